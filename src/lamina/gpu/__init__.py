"""Slices of real GPUs: partitions, an executor that runs batches on them, and the memory under it."""
