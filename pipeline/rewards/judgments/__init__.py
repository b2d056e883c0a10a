"""Built-in judgments: what is wrong with a response, by rules.

``by_arithmetic`` and ``recorded`` run in the worker, ``by_math`` in a sandbox. Each takes wrong
responses, and returns a text or nothing for each. ``counter_chain`` and ``equations`` find the
first step that does not hold, ``values`` computes. ``pipeline.rewards.functions`` gathers them."""
