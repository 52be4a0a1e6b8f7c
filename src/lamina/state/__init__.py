"""State that functions keep: keys and values, their commits, and the triggers that watch them."""
