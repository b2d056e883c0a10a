"""Incidents: what was found wrong with a component, since when, and by which evidence."""
