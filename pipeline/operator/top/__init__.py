"""``headrace top``: a full-screen terminal view of a run, with keys that change the run."""
