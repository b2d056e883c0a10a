"""Verifiers and reward shaping: from finished responses to scores.

README.md explains how to write a verifier and check it before training. ``verifier`` has the types,
``registry`` the names, and ``pool`` turns batches of responses into outcomes. ``arithmetic``,
``by_model``, ``recorded`` and ``dapo_math`` run in the worker; ``equivalence``, ``programs`` and
users' verifiers run in sandboxes (``process`` is the parent's end, ``sandbox`` the child's).
``functions`` adds further rewards and guidance, ``judgments/`` finds wrong steps by rules, and
``shaping`` turns verdicts into rewards."""
