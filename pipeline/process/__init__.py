"""Processes as the operating system sees them: identity, descendants, exit codes, stacks, progress."""
