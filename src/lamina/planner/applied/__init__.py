"""From a plan of slices and rounds to instances that stand and take turns."""
