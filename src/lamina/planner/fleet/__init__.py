"""Offline capacity planning: how many devices, cut into which slices. Behind `lamina plan`."""
