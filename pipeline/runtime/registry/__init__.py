"""The registry: its contract, and the one in Redis."""
