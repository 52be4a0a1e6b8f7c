"""The sections of a scenario file, one reader each."""
