"""Placements over CPU and GPU reserved over time, for admission control."""
