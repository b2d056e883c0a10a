"""Training on several processes: one *rank* each, which hold a share of the weights and compute in
step.

    supervisor ──starts──> launcher (launch) ──torch's elastic agent──> rank 0, rank 1, ...

Rank 0 is the worker: the actor that speaks to the ledger, and the only one that knows of messages,
claims and files. It *leads* (``lead``): each call of its backend is told to the others as one
command (``messages``) and carried out by all ranks at once. The others *follow* (``follow``): they
wait for the next command, for a bounded time, and do what it says with the same code.

What a rank holds, and how gradients get together, is one of two *shards*: ``fsdp2`` (torch's
``fully_shard``) or ``zero`` (DeepSpeed). ``sharded`` makes of either what workers know: gathered
weights, snapshots, loads; ``training`` the policy's backend behind it, ``value`` the critic's,
``backend`` what is the same in both. With one rank the same classes work in the worker's own
process, and nobody is told anything.

A rank that dies takes all of them down: the agent ends the others, the launcher ends with one exit
code and says which rank it was; the supervisor starts a new launcher, and rank 0 goes on from its
checkpoint.
"""
