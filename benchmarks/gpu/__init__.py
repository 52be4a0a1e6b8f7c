"""What a real GPU does under Lamina: every figure measured beside bare torch in the same run."""
