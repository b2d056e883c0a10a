"""How long a fleet needs to recover from a fault, on real processes.

``trials`` scores the records, and is pure. ``processes`` injects faults into a real fleet."""
