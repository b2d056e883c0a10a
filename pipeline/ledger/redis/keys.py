"""Every key that a run keeps in Redis: name, type, meaning, lifetime.

*Consumes* a run's name. *Produces* key names. *Waits for* nothing.

All keys of a run begin with the same hash tag, ``{run}:``, so that a cluster keeps the whole run in
one slot, on one shard. A script is routed by the one key it is given (``counters``) and derives
every other key from that key's tag; a derived key has the same tag, therefore the same slot, and a
slot is only ever served whole by one node. That is why derived keys are safe in a cluster.

Names of a worker's incarnation are ``generator-0#3``; of trajectories and chunks, ``t.12.3`` and
``t.12.3.0``; a *unit* is a group number, a trajectory id or a chunk id, by the run's unit. *Order*
is the order of admission as one number: the group's number; ``group * group_size + member``; and
for chunks that times 65,536 plus the chunk's index.

| key | type | meaning | lifetime |
|---|---|---|---|
| ``{run}:spec`` | hash | what the ledger was made with, setting -> text | the run |
| ``{run}:settings`` | string | the same, as the scripts read it: one MessagePack map | the run |
| ``{run}:counters`` | hash | version, credit, bytes, admitted, trained, dropped:reason, stored:<incarnation> | the run |
| ``{run}:epochs`` | hash | worker -> newest epoch; written by the registry, read by every script as the fence | the run |
| ``{run}:groups`` | zset | numbers of groups that are not settled | the run |
| ``{run}:group:<n>`` | hash | prompt, finals, missing, oldest, scored, accuracy, mixed, live, dropped, state | until settled |
| ``{run}:trajectory:<id>`` | hash | next, final, holder, tokens, oldest, newest, missing, live, last, spoiled | until settled |
| ``{run}:chunk:<id>`` | hash | blob, a field per score, bytes, tokens, oldest, final, missing, attempts | until settled |
| ``{run}:open`` | zset | trajectories with credit that nobody holds, by order | while so |
| ``{run}:parked`` | zset | (unit chunk) trajectories whose next window waits for a credit, by order | while so |
| ``{run}:again`` | zset | prompts of retried dead letters, admitted before fresh ones, by place in the stream | while so |
| ``{run}:running`` | zset | units with credit that are not ready, by order | while so |
| ``{run}:running_age`` | zset | those of them that have begun, by the updates in the oldest version they may hold | while so |
| ``{run}:ready`` | zset | units that the learner may claim, by order | while so |
| ``{run}:ready_age`` | zset | the same units, by the updates in the version of their oldest token | while so |
| ``{run}:holders`` | zset | incarnations that hold trajectories, by the time their lease ends | while so |
| ``{run}:held:<incarnation>`` | set | trajectories that an incarnation holds | while so |
| ``{run}:asked:<incarnation>`` | hash | the last numbered request of each kind and its answer, for repeats | one day |
| ``{run}:due:<field>`` | zset | chunks that lack a field, by the time at which they are handed out again | until scored |
| ``{run}:claims`` | hash | claims that are not settled, id -> policy version | until settled |
| ``{run}:claim:<id>`` | zset | units of a claim, by order | until settled |
| ``{run}:lineage`` | zset | restarts as ``version:updates``, by version (``pipeline.ledger.version_history``) | the run |
| ``{run}:milestones`` | zset | ``updates:`` and what was trained by then, one a checkpoint, at most 1,000 | the run |
| ``{run}:finished:<id>`` | hash | final, reward, ``value:<index>``, num_chunks, num_values, bytes, state, claim | (below) |
| ``{run}:finished`` | zset | those of them that the value worker may claim, by order | while so |
| ``{run}:finished_claims`` | set | the value worker's claims that are not settled | until settled |
| ``{run}:finished_claim:<id>`` | zset | trajectories of such a claim, by order | until settled |
| ``{run}:dead`` | list | dead letters, newest first, at most 1,000 | the run |
| ``{run}:evaluation_open`` | zset | evaluation trajectories that nobody holds, by evaluation, prompt and sample | while so |
| ``{run}:evaluation:<n>`` | hash | request, number of failed responses | the run |
| ``{run}:evaluation:<n>:samples`` | hash | ``prompt.sample`` -> accuracy, reward, tokens, oldest and newest version | the run |
| ``{run}:endpoints`` | hash | registry: worker -> role, endpoint, public key | the run |
| ``{run}:heartbeats`` | hash | registry: worker -> its last heartbeat | until it departs |
| ``{run}:seen`` | zset | registry: workers by the server's time of their last sign of life | until it departs |
| ``{run}:fleet`` | string | registry: the desired number of workers by role | the run |
| ``{run}:weights`` | string | registry: the newest published weights | the run |
| ``{run}:run_status`` | string | registry: the run's state and the sentence that explains it | the run |
| ``{run}:news:<topic>`` | stream | registry: one entry, written with every change of weights, endpoints or run | the run |

``{run}:finished:<id>`` is kept for the value worker, apart from the chunks, from a trajectory's
first value until the value worker has trained on it, or until it is dropped for a reason after
which no critic may learn from it.
"""

from __future__ import annotations


def prefix(run: str) -> str:
    """Return what every key of a run begins with. Raises ValueError for a name that would break the
    hash tag.
    """
    if not run or "{" in run or "}" in run:
        raise ValueError(f"run name is {run!r}; expected text without braces, since it becomes the keys' hash tag")
    return f"{{{run}}}:"


# -- the ledger (the scripts derive their own; these are what Python reads or names)
# --------------------------------------


def counters(run: str) -> str:
    """Hash of the ledger's counters; also the key by which every script is routed."""
    return prefix(run) + "counters"


def spec(run: str) -> str:
    """Hash of the settings that the ledger was made with."""
    return prefix(run) + "spec"


def settings(run: str) -> str:
    """String: what the scripts need of ``spec``."""
    return prefix(run) + "settings"


def trajectory(run: str, trajectory_id: str) -> str:
    """Hash of one trajectory."""
    return f"{prefix(run)}trajectory:{trajectory_id}"


def chunk(run: str, chunk_id: str) -> str:
    """Hash of one chunk: its blob and its scores."""
    return f"{prefix(run)}chunk:{chunk_id}"


def claims(run: str) -> str:
    """Hash claim id -> policy version of the claims that are not settled."""
    return prefix(run) + "claims"


def claim(run: str, claim_id: str) -> str:
    """Sorted set of one claim's units."""
    return f"{prefix(run)}claim:{claim_id}"


def version_history(run: str) -> str:
    """Sorted set of restarts."""
    return prefix(run) + "lineage"


def finished(run: str, trajectory_id: str) -> str:
    """Hash of what is kept of one trajectory for the value worker."""
    return f"{prefix(run)}finished:{trajectory_id}"


def dead(run: str) -> str:
    """List of dead letters, newest first."""
    return prefix(run) + "dead"


def evaluation(run: str, number: int) -> str:
    """Hash of one evaluation's request and failures."""
    return f"{prefix(run)}evaluation:{number}"


def evaluation_samples(run: str, number: int) -> str:
    """Hash of one evaluation's scored responses."""
    return f"{prefix(run)}evaluation:{number}:samples"


# -- the registry
# ---------------------------------------------------------------------------------------------------------


def epochs(run: str) -> str:
    """Hash worker -> newest epoch (an integer). The registry raises it with HINCRBY; the ledger's
    scripts fence by it.
    """
    return prefix(run) + "epochs"


def endpoints(run: str) -> str:
    """Hash worker -> role, endpoint and public key of its mailbox."""
    return prefix(run) + "endpoints"


def heartbeats(run: str) -> str:
    """Hash worker -> last heartbeat."""
    return prefix(run) + "heartbeats"


def seen(run: str) -> str:
    """Sorted set of workers by the server's time of their last sign of life."""
    return prefix(run) + "seen"


def fleet(run: str) -> str:
    """String: the desired number of workers by role."""
    return prefix(run) + "fleet"


def weights(run: str) -> str:
    """String: the newest published weights."""
    return prefix(run) + "weights"


def run_status(run: str) -> str:
    """String: the run's state and the sentence that explains it."""
    return prefix(run) + "run_status"


def notifications(run: str, topic: str) -> str:
    """Stream of one entry, which whoever waits for a change of ``topic`` waits at."""
    return f"{prefix(run)}news:{topic}"
