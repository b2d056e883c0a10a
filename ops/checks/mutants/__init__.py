"""Learning mutants: small changes that make a run learn wrongly, and the tests that must notice.

*Consumes* ``catalogue.toml``, the list of changes, and a copy of the working tree. *Produces*
``ops/results/mutants.json`` and the page ``ops/results/mutants.md``: which test ended each mutant,
or that it survived. ``make mutants`` runs it; nothing is changed in the tree itself.

A mutant names a file, a text that stands in it exactly once, what stands there instead, what that
breaks, and the tests that should notice: files or single tests, never fleets. One that computes the
same as the original says why, in ``equivalent``. ``tests/ops/checks/test_mutants.py`` holds the
list to the tree, so that it cannot rot.
"""
