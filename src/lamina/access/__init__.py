"""Who may do what: people, tokens, tenants, secrets, and the book of who did it."""
