"""Scoring of given tokens by frozen models: the seam, and the engines behind it."""
