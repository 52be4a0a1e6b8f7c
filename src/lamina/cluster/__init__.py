"""Many machines: agents that own the devices of one machine each, and the leader's side of them."""
