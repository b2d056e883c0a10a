"""``headrace top``: a full-screen view of a run on a terminal, with keys that change the run."""
