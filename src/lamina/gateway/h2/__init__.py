"""HTTP/2 as far as gRPC needs it, on the gateway's own event loop. Why our own: docs/decisions/0013-our-own-grpc.md."""
