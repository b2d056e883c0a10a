"""The engines of generation, scoring, training and values, each kind behind one Protocol. Of the
packages, only this one and ``pipeline.algorithms`` import torch."""
