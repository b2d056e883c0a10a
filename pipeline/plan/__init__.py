"""A run placed before it costs anything: what its work costs, how fast a fleet would be, which fleet to start.

Imports nothing of torch and talks to no run that goes on."""
