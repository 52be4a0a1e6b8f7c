"""What must survive a restart: SQLite by default, PostgreSQL by URL."""
