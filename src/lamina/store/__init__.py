"""Durable storage: SQLite by default, PostgreSQL by URL."""
