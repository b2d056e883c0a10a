"""What every worker process stands on: registry, heartbeats, two-phase stop, logs, and the embedded
ledger server.
"""
