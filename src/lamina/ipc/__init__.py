"""Inter-process communication: child processes, framed messages, writes that leave at once."""
