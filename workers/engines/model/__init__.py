"""What all engines share around a model: loading, attention, weight files, optimisers, random
streams."""
