"""Admission control by reservations over time on CPUs and GPUs (the thesis's chapter 4)."""
