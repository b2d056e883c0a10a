"""Processor time of the control plane, by part: a real fleet whose emulated devices cost nothing.

``probe`` samples every process of the fleet, and ``parts`` returns the part that a sample belongs
to. ``fleet`` runs a fleet of one size and reads the samples. ``python -m ops.bench.overhead
--help`` lists the options."""
