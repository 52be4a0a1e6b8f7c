"""How many devices, cut into which slices: the offline side of `lamina plan`."""
