"""Copies of a run in an object store, from which another machine can resume it."""
