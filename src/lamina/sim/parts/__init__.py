"""Readers of the sections of a scenario file."""
