"""The registry: its contract, and the implementation in Redis."""
