"""Policies of the folder above; the file name is the registration."""
