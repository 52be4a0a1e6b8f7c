"""HTTP and gRPC in front of a running loop: parsing, limits and responses; nothing here decides about work."""
