"""Transports: HTTP/1.1, HTTP/2 and gRPC framing, TLS and listeners, without a word about what is served."""
