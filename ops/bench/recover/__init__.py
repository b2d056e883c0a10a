"""How long a fleet needs to be whole again after a fault, on real processes.

``arrivals`` has the times of faults, and ``trials`` scores the records; both are pure. In
``processes`` a real fleet is struck, and ``__main__`` is the command."""
