"""The server that holds a run's ledger: the embedded one, and what a server of others promises."""
