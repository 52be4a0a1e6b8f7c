"""HTTP routes: calls, runs, state and status, and the codec between HTTP and named inputs."""
