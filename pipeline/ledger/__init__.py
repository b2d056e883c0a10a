"""The ledger: the durable replay buffer between sampling and learning.

Every call returns at once, with a refusal that names its reason when nothing can be given. The
learner's drops and updates return credit, which unblocks generators. Units that become ready
unblock the learner. Links and ``overdue`` bring chunks to scorers.

A trajectory's states, and its unit's::

       credit                  chunk, chunk, ...       final chunk        last score       claim        checkpoint
    admit ──> open ──────────> leased ───────────────> finished ────────> ready ────────> claimed ────────> trained
               ^ ^  lease        │ │                      │                 │  ^             │
               │ └───────────────┘ │ window, unit chunk,  │ no_signal       │  └─────────────┤
               │  lease ended,     │ no credit            │ dead_letter     │ stale          │ recover
               │  given back,      v                      v                 v                v
               └─────────────── parked                 dropped <──────── dropped <──────── dropped
                  credit                                                              non_finite

``cancelled`` leads from every state to dropped. A drop returns the unit's credit. Training does
not: the limit grows with the version (``pipeline/ledger/staleness.md``).

With guidance, the write of the reward makes a final chunk due for it at once. Reference workers
take it by ``overdue``, which gives the reward with it::

    final chunk ──> reward ──> due ──> with a reference worker ──> guidance ──> complete
                                ^              │
                                └──────────────┘ deadline, failure

With a critic, a finished trajectory also goes to the value worker, whatever becomes of its unit::

    first value ──> kept ──────────────────────────────────> finished ────────> claimed ────────> trained
                             final chunk, its reward,             ^                 │
                             every chunk's values                 └─────────────────┘ recover

Its data is stored apart from the chunks, which are settled or dropped earlier, in any order. Three
drops also end this copy: as a dead letter, for a value that is not finite, and cancelling.

==================  ==================================================================================================
``types``           the nouns: specification, leases, claims, results
``contract``        the ledger's promises; ``redis`` implements them, and the tests' oracle in memory
``staleness.md``    the proof of the bound on staleness
``version_history`` updates of a policy version, after the learner went back to a checkpoint
``validation``      arguments that both ledgers refuse, and the errors
``stored``          stored bytes back to nouns, for both ledgers
``admin``           an operator's side: what the next update waits for, putting work back
``inspection``      looks: open groups, staleness, drops against what was trained
``life``            what happened to one trajectory
``address``, ``url``  where a run's ledger is; the password in its URL
``token``           what lets another host join a run as one role
``server/``         the embedded server, and the promises of external ones
``redis/``          the ledger on a server: keys, connection, and one Lua script a transition
==================  ==================================================================================================
"""
