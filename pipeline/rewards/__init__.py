"""Verifiers and reward shaping: from finished responses to scores.

README.md has how to write a verifier and check it before training. ``verifier`` has the nouns,
``registry`` the names, ``pool`` the engine: batches in, outcomes out. ``arithmetic``, ``by_model``
and ``dapo_math`` run in the worker; ``equivalence`` and users' verifiers in a sandbox (``process``
is its parent's end). ``shaping`` makes rewards of verdicts. ``guidance`` adds judgments of wrong
responses, and ``judgments/`` has the rules that write them."""
