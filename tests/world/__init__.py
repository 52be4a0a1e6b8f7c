"""A simulated machine for whole servers: virtual time, cooperative threads, sockets in memory, disks and workers that fail.

The gateway, the durable runs, the state, the triggers and the store of the product run here unchanged. What they ask of the
machine (the time, threads and their queues, sockets, worker processes) is answered by this package, from one seed, in one
thread at a time: what happens once happens again when the seed is played again.
"""
