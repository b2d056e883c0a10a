"""The registry: one contract, in memory and in Redis."""
