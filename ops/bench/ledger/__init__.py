"""The cost of durability: chunks through ledger and wire, against other ways to move rollouts.

``path`` is the product's own code from lease to settle, and ``rivals`` are the comparisons.
``payload`` makes the chunks that all of them move. ``race`` starts the processes of a contender
together and measures the time. ``python -m ops.bench.ledger --help`` lists the options."""
