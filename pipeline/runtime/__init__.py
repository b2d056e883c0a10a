"""The base of every worker process: actor, registry, heartbeats, two-phase stop, logs."""
