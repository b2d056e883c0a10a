"""Reward, reference and value workers: each adds one field to chunks."""
