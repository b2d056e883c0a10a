"""How much waiting is left: the real control plane around emulated engines, five ways to schedule the same draws.

``scenarios`` lists the schedules, ``ideal`` computes the best possible time from the same draws, and
``measure`` runs a scenario and reads its figures."""
