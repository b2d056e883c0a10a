"""Reward, reference and value workers: chunks in, one field of each out."""
