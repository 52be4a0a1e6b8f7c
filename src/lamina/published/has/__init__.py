"""HAS-GPU and FaST-GShare: pods with a slice and a time quota, scaled up and out."""
