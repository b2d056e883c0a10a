"""The analysis of ``pipeline.flow`` on emulated fleets, with faults and negative controls.

``model`` is a fleet in virtual time. ``faults`` breaks it, and alone knows the truth. ``sampling``
makes the tables that any fleet has, and the analysis reads nothing else. ``scoring`` compares."""
