"""Speed of our own code, as ratios against a stated floor measured in the same run. Never a timed test."""
