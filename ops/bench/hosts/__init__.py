"""A run whose workers are on several hosts, against the same run on one host."""
