"""Access control: users, tokens, tenants, secrets, and the audit log."""
