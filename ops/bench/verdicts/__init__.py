"""Verdicts of the verifier ``math`` on right solutions in eleven forms, and on twenty-one kinds of
corruption of them.

``python -m ops.bench.verdicts`` prints a row a form and a row a kind. Solutions come from templates
in GSM8K's style (``solutions.py``), or from GSM8K's own file where one is given."""
