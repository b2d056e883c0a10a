"""What the control plane costs in processor time, by part: a real fleet whose emulated devices cost
nothing.

``probe`` is what every process of the fleet takes samples with, ``parts`` says what a sample
belongs to, ``fleet`` runs a fleet of one size and reads them.
``python -m ops.bench.overhead --help``.
"""
