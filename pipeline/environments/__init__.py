"""Environments: conversations of several turns and tools. Pure; the worker is ``workers.scorers.environment``."""
