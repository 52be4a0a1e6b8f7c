"""Profiler: measures a function on slices of a device, and writes profiles for plans, simulations and servers."""
