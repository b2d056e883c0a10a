"""Every update of a learner, with its inputs, their order and its results, to be made again.

``records`` holds the types, ``frames`` the bytes, ``folder`` the files. ``plan`` computes the runs
that make a version again."""
