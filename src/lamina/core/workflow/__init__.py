"""Workflows: flows, runs, error handling, timers and the write-ahead journal of durable runs."""
