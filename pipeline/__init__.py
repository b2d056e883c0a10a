"""Floor 1: the system itself. Mostly pure functions and small state machines, over the words of
``protocol``."""
