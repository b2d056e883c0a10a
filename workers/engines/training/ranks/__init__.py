"""Training on several processes, called *ranks*. Each has a share of the weights; all compute in
step.

    supervisor ──starts──> launcher (launch) ──torch's elastic agent──> rank 0, rank 1, ...

Rank 0 is the worker: the actor that talks to the ledger, and the only one that knows of messages,
claims and files. It *leads* (``lead``): each call of its backend is sent to the others as one
command (``messages``) and carried out by all ranks at once. The others *follow* (``follow``): they
wait for the next command, for a bounded time, and run the same code.

Three kinds of *shards* split the weights and combine the gradients: ``fsdp2`` (torch's
``fully_shard``, with ``tensor`` for the matrices of a layer), ``zero`` (DeepSpeed) and ``stages`` (a
pipeline: each rank has some of the layers).
``sharded`` adds what workers do with any: gathered weights, snapshots, loads. ``backend`` builds the
policy's and the critic's backends on it. With one rank the same classes work in the worker's own
process, and no command is sent.

If one rank dies, all do: the agent ends the others, and the launcher exits with one code and
reports which rank it was. The supervisor starts a new launcher, and rank 0 resumes from its
checkpoint."""
