"""What a user of Lamina writes with: apps, functions, workflows, and the clients that call them."""
