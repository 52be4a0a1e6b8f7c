"""Web apps beside functions: an ASGI application that `App.mount` adds, served on the port of the calls by a process of its own.

The process is a bulkhead: a web app that blocks its loop, leaks or dies does so alone, and calls are served on. The gateway
parses and limits requests, gives its own routes precedence, and passes the others on as frames; the host runs the application.
Functions are called from there over a private socket of the gateway (`lamina.sock`), without network or token.
"""
