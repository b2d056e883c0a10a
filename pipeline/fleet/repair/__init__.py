"""The escalation of repairs: decides what to do next about a lost or suspect worker."""
