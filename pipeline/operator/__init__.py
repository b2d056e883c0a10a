"""The operator's side: connecting to a run, showing its status, changing it and ending it."""
