"""The cost of durability: chunks through ledger and wire, against other ways to move rollouts.

``path`` is the product's own code from lease to settle, ``rivals`` are the comparisons, ``payload`` makes the
chunks that all of them move, and ``race`` starts the processes of a contender together and times them."""
