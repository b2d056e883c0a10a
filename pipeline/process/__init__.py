"""A process as the operating system knows it: identity, descendants, exit code, last
error, work."""
