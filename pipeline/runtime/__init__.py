"""What every worker process is built on: actor, registry, heartbeats, two-phase stop, logs."""
