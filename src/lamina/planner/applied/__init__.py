"""Application of a plan: from slices and rounds to instances that hold them and take turns."""
