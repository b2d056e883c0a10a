"""Built-in judgments: rules that find what is wrong with a response.

Each takes wrong responses and returns a text or None for each. ``by_arithmetic`` runs in the
worker, ``by_math`` in a sandbox. ``equations`` reads equations and finds the first that does not
hold. ``pipeline.rewards.functions`` collects the judgments."""
