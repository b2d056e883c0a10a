"""How much of the waiting is left: the real control plane around emulated engines, five ways to
schedule the same draws.

``scenarios`` lists the compared ways to schedule, and ``ideal`` computes the best time from the
same draws. ``measure`` runs a scenario and reads its figures. ``python -m ops.bench.overlap
--help`` lists the options."""
