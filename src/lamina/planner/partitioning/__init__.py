"""Partition plans: devices cut into slices that functions share in turns, so that rates and SLOs are met."""
