"""Floor 1: what the system is. Mostly pure functions and small state machines, over the words of ``protocol``."""
