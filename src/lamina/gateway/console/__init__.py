"""Console: the web page of a server, on the management listener, and the feed and figures behind it."""
