"""The SDK: apps, functions and workflows as users write them, and the clients that call them."""
