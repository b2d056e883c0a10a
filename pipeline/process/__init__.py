"""A process of Headrace as the operating system knows it: identity, descendants, exit code, last
error, work so far.
"""
