"""Load generator: open loop, over real sockets, against any HTTP server."""
