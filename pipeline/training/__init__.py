"""State that outlives a learner or value worker: checkpoints, snapshots, mirror, update log; and the critic gate."""
