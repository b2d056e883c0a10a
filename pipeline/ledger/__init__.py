"""The ledger: the durable replay buffer between sampling and learning.

Every call returns at once; when there is nothing to give, the result says why. The learner's drops
and updates return credit, which unblocks generators. Units that become ready unblock the learner.
Chunks reach scorers over links and, when a link failed, through ``overdue``.

The states of a trajectory and its unit::

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

With an environment, a trajectory waits at the end of each turn, held by nobody; its chunk is due for the turn
as for other scores::

    leased ── a turn ends ──> waiting ──> turn ──> open (unit chunk: parked)
                                  └──> last turn ──> finished

With guidance, writing the reward makes the final chunk due for guidance at once. Reference workers
get it from ``overdue``, together with the reward::

    final chunk ──> reward ──> due ──> with a reference worker ──> guidance ──> complete
                                ^              │
                                └──────────────┘ deadline, failure

With a critic, a finished trajectory also goes to the value worker, whatever happens to its unit::

    first value ──> kept ──────────────────────────────────> finished ────────> claimed ────────> trained
                             final chunk, its reward,             ^                 │
                             every chunk's values                 └─────────────────┘ recover

Its data is stored separately from the chunks, which may be settled or dropped first. Three kinds of
drop remove this copy too: dead letter, non-finite and cancelled.

==================  ==================================================================================================
``types``           specification, leases, claims, results
``contract``        the ledger's promises, implemented by ``redis`` and by the tests' in-memory oracle
``staleness.md``    the proof of the bound on staleness
``version_history`` maps policy versions to updates after the learner went back to a checkpoint
``validation``      arguments that both ledgers refuse, and the errors
``stored``          decodes stored bytes, for both ledgers
``admin``           for operators: what the next update waits for, requeueing work, pauses
``inspection``      read-only views: open groups, staleness, drops compared with trained work
``life``            what happened to one trajectory
``address``, ``url``  where a run's ledger is; the password in its URL
``token``           join tokens: let another host join a run in one role
``server/``         the embedded server, and checks of external ones
``redis/``          the ledger on a Redis server: keys, connection, and one Lua script per transition
==================  ==================================================================================================
"""
