"""Durable runs: accepted when they are on disk, recovered by replaying their journal."""
