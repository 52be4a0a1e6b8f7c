"""Values of runs: where they lie (memory, shared memory, device), which jobs still need them, and how inputs are made of them."""
