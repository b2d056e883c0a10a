"""Hosts on one machine, for benchmarks, drills and tests."""
