"""KServe on the Knative autoscaler: pods on whole GPUs, by requests in flight."""
