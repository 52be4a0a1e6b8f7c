"""HTTP in front of the live loop: parsing, limits and answers; nothing here decides about work."""
