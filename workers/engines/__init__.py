"""The engines for generation, scoring, training and values, each kind behind one Protocol.

Only this package and ``pipeline.algorithms`` import torch."""
