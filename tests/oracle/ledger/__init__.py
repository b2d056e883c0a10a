"""The ledger in this process: the oracle that the ledger in Redis is compared with."""
