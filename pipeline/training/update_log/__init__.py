"""A log of every update of a learner: its inputs in order, and its results, so that it can be
replayed.

``records`` has the record types, ``folder`` the files, and ``plan`` computes what to replay for a
requested version."""
