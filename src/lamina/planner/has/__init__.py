"""Pods with a slice and a quota, as HAS-GPU and FaST-GShare scale them."""
