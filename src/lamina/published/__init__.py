"""Published systems, one folder per paper: its algorithms, its policies, its data reader. Nothing in the product imports them."""
