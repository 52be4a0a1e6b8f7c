"""Worker processes: one function each, its batches one at a time."""
