"""The analysis of ``pipeline.fleet.flow`` on emulated fleets, with faults and negative controls.

``model`` is a fleet in virtual time. ``faults`` breaks it, and alone knows the truth. ``sampling`` records what
an observer sees of any fleet, and the analysis reads nothing else. ``scoring`` compares its answer with the
truth."""
