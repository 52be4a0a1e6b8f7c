"""Measures a function on slices of a device, and writes profiles that plans, simulations and servers start from."""
