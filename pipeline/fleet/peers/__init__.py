"""Finds odd workers of a fleet: by explicit rules, and by comparison with their peers and their own
past.

Everything here is pure: numbers and times are arguments."""
