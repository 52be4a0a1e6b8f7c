"""The controller: a pure state machine. No clock, no IO, no dice; imports nothing that has them."""
