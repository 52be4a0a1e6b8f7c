"""Observability: metrics, traces, logs and bills."""
