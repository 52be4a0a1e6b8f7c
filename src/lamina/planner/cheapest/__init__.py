"""The default policy: every batch in the cheapest way that is still in time."""
