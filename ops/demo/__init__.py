"""The demonstration: its task, and the small model that it trains."""
