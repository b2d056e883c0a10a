"""The ledger: the durable replay buffer between sampling and learning.

*Consumes* chunks from generators, scores from scorers, claims from the learner. *Produces* leases,
overdue work, batches. *Waits for* nothing: every call answers at once, if need be with the reason
why it gives nothing. Generators are unblocked by credit, which the learner returns; the learner by
units that become ready; scorers by the wire, or by ``overdue``.

A trajectory, and the unit that it is or belongs to::

       credit                  chunk, chunk, ...       final chunk        last score       claim        checkpoint
    admit ──> open ──────────> leased ───────────────> finished ────────> ready ────────> claimed ────────> trained
               ^ ^  lease        │ │                      │                 │  ^             │
               │ └───────────────┘ │ window, unit chunk,  │ no_signal       │  └─────────────┤
               │  lease ended,     │ no credit            │ dead_letter     │ stale          │ recover
               │  given back,      v                      v                 v                v
               └─────────────── parked                 dropped <──────── dropped <──────── dropped
                  credit                                                              non_finite

``cancelled`` leads from every state to dropped. A drop returns the unit's credit; being trained
does not, for the limit grows with the version instead (``pipeline/ledger/staleness.md``).

With a critic, a finished trajectory also goes a way of its own, to the value worker, whatever
becomes of its unit::

    first value ──> kept ──────────────────────────────────> finished ────────> claimed ────────> trained
                             final chunk, its reward,             ^                 │
                             every chunk's values                 └─────────────────┘ recover

It is kept apart from the chunks, since windows are settled or dropped in any order and long before
the last one is there. A dead letter, a value that is not finite, or cancelling takes it from there,
too; every other drop does not.

==================  ==================================================================================================
``types``           the nouns: what the ledger is made with, what it gives out, what it answers
``contract``        what the ledger promises; ``memory`` and ``redis`` keep it
``staleness``       the bound on staleness; ``staleness.md`` beside it is the proof
``version_history`` which updates a policy version stands for, after the learner went back to a checkpoint
``validation``      what both ledgers refuse, and how they say it
``queues``          the ledger's queues by name
``admin``           an operator's side: what is waited for, putting work back
``address``, ``url``  where a run's ledger is; the password in its URL
``server/``         the embedded server, and what a server of others promises
``memory/``         the ledger in this process: the oracle that the other is compared with
``redis/``          the ledger on a server: keys, connection, and one Lua script a transition
==================  ==================================================================================================
"""
