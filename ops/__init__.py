"""For the operator: supervise script, start model, benchmarks."""
