"""The operator's side: a run that is connected, its status, and how it is changed and ended."""
