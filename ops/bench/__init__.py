"""Benchmarks: ``python -m ops.bench.NAME``, each a table for people and ``--json FILE`` for programs."""
