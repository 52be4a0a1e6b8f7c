"""The controller in virtual time."""
