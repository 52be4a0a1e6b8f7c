"""Simulator: the controller in virtual time, on devices that are profiles."""
