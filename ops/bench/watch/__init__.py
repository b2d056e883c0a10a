"""Synthetic fleets with known faults, and how well the watch names the faulty worker."""
