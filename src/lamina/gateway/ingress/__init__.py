"""Several processes that speak HTTP in front of one controller.

They share the port, parse requests and encode answers; the controller's process gets values, not text. Whatever else is
asked for is passed on as it is, so that everything behaves as with one process.
"""
