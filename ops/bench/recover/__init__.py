"""How long a fleet needs to be whole again after a fault, on real processes.

``trials`` scores the records, and is pure. ``processes`` injects faults into a real fleet, and
``__main__`` is the command."""
