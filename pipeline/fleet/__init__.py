"""The fleet as its heartbeats show it: one state, one table of limits, one verdict on a worker."""
