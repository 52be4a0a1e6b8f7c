"""Pure algorithms that policies share."""
