"""Verdicts of the verifiers ``math``, ``math_strict`` and ``math_loose`` on right solutions in many
forms, and on many kinds of corruption of them.

``python -m ops.bench.verdicts`` prints a row a form and a row a kind. Solutions come from templates
in GSM8K's style (``solutions.py``), or from GSM8K's own file where one is given."""
