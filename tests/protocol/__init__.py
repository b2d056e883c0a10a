"""Tests of what processes say to one another."""
