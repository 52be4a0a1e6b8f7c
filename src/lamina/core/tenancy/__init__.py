"""Tenancy: fair sharing between tenants, their usage and their limits."""
