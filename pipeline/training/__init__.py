"""What learner and value worker share: checkpoints, and the gate that the critic opens."""
