"""Drivers of the controller: virtual time (a heap) and real time (asyncio)."""
