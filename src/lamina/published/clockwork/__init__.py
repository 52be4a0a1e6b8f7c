"""Clockwork (OSDI 2020): one batch at a time on a whole GPU, the most urgent start first."""
