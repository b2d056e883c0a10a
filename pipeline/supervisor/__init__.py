"""The supervisor: starts, watches and restarts the worker processes that the desired fleet calls
for."""
