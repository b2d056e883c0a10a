"""A run as people and programs see it: status, metrics, views, history, report, ``why``."""
