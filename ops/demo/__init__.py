"""The demonstration: its tasks, and the small models that it trains."""
