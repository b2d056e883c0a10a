"""Which repair comes next for a worker that is lost or suspected: the escalation."""
