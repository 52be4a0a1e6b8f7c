"""Real-time driver, engines and run values: the controller in real time, with the values the core never sees."""
