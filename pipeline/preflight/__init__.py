"""What can be known to be wrong with a run before any process is started."""
