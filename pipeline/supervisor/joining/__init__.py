"""How workers of other hosts join a run that shares nothing with them but the ledger and the wire.

On the run's host: ``manifest`` (what a joined host needs), ``file_fetch`` (ranges of its files),
``run_host`` (the thread that does both, and receives what joined hosts send home). On both sides:
``host_keys`` (CURVE keys by the ledger, and the tokens' users).

On a joined host: ``file_cache`` and ``file_fetch`` (files by digest), ``joined_folder`` (a run's
folder made of them), ``joined_supervisor`` (its workers), ``home`` (logs and tallies).
``join`` waits there for a resumed run."""
