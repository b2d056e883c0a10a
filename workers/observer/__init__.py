"""The observer: turns heartbeats into incidents and a history of metrics."""
