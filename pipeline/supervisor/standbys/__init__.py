"""Warm standbys: how many there are, what becomes of each, and their processes."""
