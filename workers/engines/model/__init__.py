"""What all engines around a model share: loading, packed attention, weights as files, optimiser,
random streams.
"""
