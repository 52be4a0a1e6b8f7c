"""HTTP/2 as far as gRPC needs it, on the server's own event loop. Why our own: docs/decisions/0013-our-own-grpc.md."""
