"""HAS-GPU (Euro-Par 2025) and FaST-GShare (ICPP 2023): autoscaling of pods with a slice and a quota."""
