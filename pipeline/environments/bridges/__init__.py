"""Environments of other packages as environments of ours. A package is imported when its class is used."""
