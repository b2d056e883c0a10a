"""The learner: claimed units in, policy versions and checkpoints out."""
