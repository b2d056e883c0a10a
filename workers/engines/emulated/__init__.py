"""Engines that compute nothing and take the configured time, for drills and benchmarks."""
