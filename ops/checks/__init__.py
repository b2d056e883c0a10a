"""Checks of the repository and of its tests: mutants, hostile bytes, words, and nothing undone
unsaid."""
