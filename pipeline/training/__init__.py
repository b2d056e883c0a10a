"""Shared by learner and value worker: checkpoints, and the gate that the critic opens."""
