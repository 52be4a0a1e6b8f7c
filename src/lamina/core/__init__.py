"""The pure core: a controller as a state machine. No clock, no IO, no random numbers; imports nothing that has them."""
