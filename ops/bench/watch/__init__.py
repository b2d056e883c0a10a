"""Synthetic fleets with known faults, and how well detectors name the faulty worker."""
