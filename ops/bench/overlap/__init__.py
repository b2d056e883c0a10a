"""How much of the waiting is left: the real control plane around emulated engines, five ways to
schedule the same draws.

``scenarios`` says what is compared, ``ideal`` what could be had at best from the same draws,
``measure`` runs a scenario and reads what came of it. ``python -m ops.bench.overlap --help``.
"""
