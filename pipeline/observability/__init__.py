"""What people and programs see of a run: status, metrics, views, history, report, ``why``."""
