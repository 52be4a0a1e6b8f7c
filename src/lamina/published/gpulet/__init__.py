"""gpu-let (USENIX ATC 2022): GPUs cut in two, parts shared in time, every SLO met."""
