"""Amazon States Language: read, checked, worked out, made into flows and written back. Pure: no clock, no files, no code run."""
