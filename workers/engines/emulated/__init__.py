"""Engines that compute nothing and take the time that they are told: for drills and benchmarks of
the pipeline.
"""
