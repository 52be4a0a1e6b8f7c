"""HTTP/2 (RFC 9113) as far as gRPC needs it, on the event loop of the server."""
