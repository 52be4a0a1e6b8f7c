"""Kernel-as-a-Service: scheduling policies for whole GPUs shared by many clients."""
