"""Clockwork (OSDI 2020): one model at a time on a GPU, and no call that would be late."""
