"""Default policy: every batch in the cheapest configuration that is still in time."""
