"""Training on several processes, *ranks*. Each has a share of the weights; all compute in step.

    supervisor ──starts──> launcher (launch) ──torch's elastic agent──> rank 0, rank 1, ...

Rank 0 is the worker: the actor that speaks to the ledger, and the only one that knows of messages,
claims and files. It *leads* (``lead``): each call of its backend is sent to the others as one
command (``messages``) and carried out by all ranks at once. The others *follow* (``follow``): they
wait for the next command, for a bounded time, and carry it out with the same code.

Two kinds of *shards* cut the weights and combine the gradients: ``fsdp2`` (torch's ``fully_shard``)
and ``zero`` (DeepSpeed). ``sharded`` adds the workers' operations to both: gathered weights,
snapshots, loads. On it stand ``training``, the policy's backend, and ``value``, the critic's;
``backend`` is their common part. With one rank the same classes work in the worker's own process,
and no command is sent.

A rank that dies takes all of them down. The agent ends the others, and the launcher ends with one
exit code and reports which rank it was. The supervisor starts a new launcher, and rank 0 goes on
from its checkpoint."""
