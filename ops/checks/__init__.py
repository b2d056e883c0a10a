"""Checks of the repository and of its tests: mutants, Lua, hostile bytes."""
