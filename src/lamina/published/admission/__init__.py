"""Admission control by reservations over time on CPUs and GPUs (thesis, chapter 4)."""
