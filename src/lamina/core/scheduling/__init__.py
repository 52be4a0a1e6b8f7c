"""Scheduling: jobs, queues, slots, leases, the cluster, admission, completions and failures; no workflows, no tenants."""
