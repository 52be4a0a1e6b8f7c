"""Experiments, a file per question. Every figure that is published comes from a file in `lab/experiments`."""
