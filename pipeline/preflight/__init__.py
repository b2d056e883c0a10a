"""Checks of a run before any process is started."""
