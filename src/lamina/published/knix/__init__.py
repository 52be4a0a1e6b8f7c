"""KNIX MicroFunctions (HiPS 2021): fixed shares of GPUs, checked before deployment."""
