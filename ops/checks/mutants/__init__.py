"""Learning mutants: small changes that make a run learn wrongly, and the tests that must notice.

``make mutants`` applies the changes of ``catalogue.toml`` to a copy of the working tree, never to the tree
itself. It writes ``ops/results/mutants.json`` and the page ``ops/results/mutants.md``, which name the test that
killed each mutant, or record that it survived.

A mutant names a file, a text that occurs in it exactly once, its replacement, and the fault that this makes. It
names the tests that should notice: files or single tests, never fleets. A mutant that computes the same as the
original has the reason in ``equivalent``. ``tests/ops/checks/test_mutants.py`` checks the list against the
tree."""
