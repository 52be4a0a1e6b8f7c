"""Slicers, one file per way to partition a device; the file name is the registration."""
