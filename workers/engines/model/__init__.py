"""Parts of all engines around a model: loading, attention, weight files, optimiser, streams."""
