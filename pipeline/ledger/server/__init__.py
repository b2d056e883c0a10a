"""The server that holds a run's ledger: the embedded one, and checks of external ones."""
