"""Attacks: a test by the name of each defect that was found by attacking the server."""
