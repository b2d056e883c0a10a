"""The server that holds a run's ledger: the embedded one, and the properties of external ones."""
