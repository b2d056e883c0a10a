"""How workers on other hosts join a run, sharing nothing with it but the ledger and the wire.

On the run's host: ``manifest`` (what a joined host needs), ``file_fetch`` (serves its files),
``run_host`` (a thread that does both, and receives logs). On both sides: ``host_keys`` (CURVE keys,
and users for join tokens).

On a joined host: ``join`` (the command), ``file_fetch`` (files by digest),
``joined_folder`` (a run folder made of them), ``joined_supervisor`` (its workers), ``home`` (sends
logs and tallies to the run's host)."""
