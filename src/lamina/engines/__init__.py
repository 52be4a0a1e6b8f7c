"""Engines perform what the controller decides: CPU workers, GPU executors, emulated devices."""
