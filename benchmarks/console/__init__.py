"""Measurements and pictures of the console."""
