"""What operators and contributors run from a checkout: benchmarks, drills, demos, checks, the documentation."""
