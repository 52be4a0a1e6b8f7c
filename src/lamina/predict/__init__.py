"""Latency prediction: how long a batch takes on a slice. One protocol (`core.policy.Predictor`), one file per method."""
