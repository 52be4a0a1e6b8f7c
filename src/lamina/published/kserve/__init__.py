"""KServe: whole GPUs behind an autoscaler that follows concurrency."""
