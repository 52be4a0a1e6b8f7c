"""Load from outside: open loop, over real sockets, against any HTTP server."""
