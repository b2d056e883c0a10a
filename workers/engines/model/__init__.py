"""The common part of all engines around a model: loading, packed attention, weights as files,
optimiser, random streams.
"""
