"""Both ledgers through one story of a million chunks, compared."""
