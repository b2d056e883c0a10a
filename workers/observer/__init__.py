"""The observer: heartbeats in, incidents and a history of metrics out."""
