"""The controller in real time: an asyncio loop, an engine, and the values the core never sees."""
