"""How long a fleet needs to be whole again after a fault, on real processes.

``arrivals`` says when faults strike, ``trials`` what is made of the records (both pure). In
``processes`` a real fleet is struck, and ``__main__`` is the command."""
