"""Ingress processes: several processes that speak HTTP and gRPC in front of one controller.

They share the port, parse requests and encode responses; the controller's process gets values, not text. Whatever they cannot
decode is forwarded as it is, so that everything behaves as with one process.
"""
