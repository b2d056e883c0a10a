"""What durability costs: chunks through ledger and wire, against the ways in which others move
rollouts.

``path`` is the product's own code from lease to settle; ``rivals`` are the comparisons, ``floor``
is the path without a ledger, ``payload`` is what all of them move, and ``race`` starts the
processes of a contender together and takes the time. ``python -m ops.bench.ledger --help``.
"""
