"""Lamina serves machine-learning functions and workflows on slices of GPUs, each with a latency goal."""

__version__ = "0.1.0"
