"""Deployments to a running server: packages, versions, rollouts, overrides, and the management listener."""
