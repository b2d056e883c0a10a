"""Every key that a run keeps in Redis: name, type, meaning, lifetime.

All keys of a run have one hash tag, ``{run}``, so a cluster keeps the whole run in one slot.
A script is routed by its one key (``counters``) and derives all others from that key's tag. They
have the same slot, and one node serves a whole slot. So derived keys are safe in a cluster.

An incarnation's name is ``generator-0#3``; a trajectory's is ``t.12.3``, a chunk's ``t.12.3.0``. A
*unit* is a group number, a trajectory id or a chunk id, by the run's unit. *Order*
is the order of admission as one number: the group's number; ``group * group_size + member``; and
for chunks that times 65,536 plus the chunk's index.

| key | type | meaning | lifetime |
|---|---|---|---|
| ``{run}:spec`` | hash | the ledger's specification, setting -> text | the run |
| ``{run}:settings`` | string | the same, as the scripts read it: one MessagePack map | the run |
| ``{run}:counters`` | hash | version, credit, bytes, admitted, trained, dropped:reason, stored:<who>, spent:<what> | the run |
| ``{run}:tallies`` | hash | what left, by end: units by staleness, sums of responses' length and difficulty | the run |
| ``{run}:lives`` | hash | trajectory that left -> its packed life, of the newest 10,000 | the run |
| ``{run}:lives_order`` | list | their names, newest first | the run |
| ``{run}:moved`` | list | trajectories whose work in flight changed (below), the newest first | the run |
| ``{run}:epochs`` | hash | worker -> newest epoch; written by the registry, read by every script as the fence | the run |
| ``{run}:groups`` | zset | numbers of groups that are not settled | the run |
| ``{run}:group:<n>`` | hash | prompt, finals, missing, oldest, live, dropped, state, and (below) more | until settled |
| ``{run}:trajectory:<id>`` | hash | next, final, holder, tokens, oldest, newest, missing, live, last, leases | until settled |
| ``{run}:chunk:<id>`` | hash | blob, a field per score, bytes, tokens, oldest, final, missing, attempts, by | until settled |
| ``{run}:open`` | zset | trajectories with credit and without a holder, by order | while so |
| ``{run}:parked`` | zset | (unit chunk) trajectories whose next window waits for a credit, by order | while so |
| ``{run}:again`` | zset | prompts of dead letters and cancelled groups, admitted first, by place in the stream | while so |
| ``{run}:paused`` | hash | an operator's pause of admission: since, by, reason | until resumed |
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
| ``{run}:shown:<kind>`` | list | 16 responses of evaluations, or of groups without signal, to be read | until taken |
| ``{run}:dead`` | list | dead letters, newest first, at most 1,000 | the run |
| ``{run}:evaluation_open`` | zset | evaluation trajectories without a holder, by evaluation, prompt and sample | while so |
| ``{run}:evaluation:<n>`` | hash | request, number of failed responses | the run |
| ``{run}:evaluation:<n>:samples`` | hash | ``prompt.sample`` -> accuracy, reward, tokens, oldest and newest version | the run |
| ``{run}:endpoints`` | hash | registry: worker -> role, endpoint, public key | the run |
| ``{run}:mailboxes`` | zset | registry: workers with a mailbox, by the time of their last sign of life | until it departs |
| ``{run}:endpoint_changes`` | zset | registry: workers by the number of their mailbox's last change | the run |
| ``{run}:heartbeats`` | hash | registry: worker -> its last heartbeat | until it departs |
| ``{run}:versions`` | zset | registry: workers by role and policy version, as one number | until it departs |
| ``{run}:reaching`` | set | registry: generators that reach their scorers | while so |
| ``{run}:seen`` | zset | registry: workers by the server's time of their last sign of life | until it departs |
| ``{run}:failures`` | zset | registry: errors that ended workers, by the server's time, the newest 32 | the run |
| ``{run}:fleet`` | string | registry: the desired number of workers by role | the run |
| ``{run}:settings_changes`` | list | registry: changes of the run's settings, JSON, in their order | the run |
| ``{run}:weights`` | string | registry: the newest published weights | the run |
| ``{run}:relays`` | hash | registry: worker -> epoch, and where it serves weights | while it gives signs of life |
| ``{run}:relay_order`` | zset | registry: relays in the order in which they came | while so |
| ``{run}:run_status`` | string | registry: the run's state and the sentence that explains it | the run |
| ``{run}:manifest`` | string | what another host needs to join: code version, settings, files | until the run's next start |
| ``{run}:home`` | stream | joined hosts' logs and tallies on their way to the run's folder, at most 256 | until received |
| ``{run}:news:<topic>`` | stream | registry: one entry, written with every change of weights, endpoints or run | the run |
| ``{run}:keys`` | set | join tokens whose hosts' CURVE keys are permitted; also ``run`` and ``owner`` | the run |
| ``{run}:keys:<token>`` | hash | public CURVE key -> host, of the hosts that joined with this token | until revoked |
| ``{run}:keys_applied`` | string | the newest of ``news:keys`` that the run's host has in its folder | the run |
| ``{run}:news:keys`` | stream | one entry, written with every change of permitted keys | the run |
| ``tokens:{run}`` | hash | join token -> its role and the digest of its secret, JSON | until revoked |

``{run}:moved`` keeps the newest 32,768 names or more, for an audit that goes on meanwhile. The counter
``moved`` counts all that were ever written.

``tokens:{run}`` alone does not begin with the tag: a join token may read every key that does.

``{run}:group:<n>`` also has admitted_s; and scored, accuracy, mixed and correct, the sum of
accuracies in millionths. It has ``judged_by`` and ``judged_until`` while a scorer judges the whole
group. ``unjudged`` is the number of members that never got a verdict; each of their trajectories has
it too.

``{run}:trajectory:<id>`` also has spoiled, and ``lease:<n>`` for the last four of its leases. With
unit chunk it has ``past:<n>`` for chunks that have left. A unit has ``ready_s``, ``claimed_s`` and
``masked``, the number of its masked responses. A chunk has ``from:<field>`` for each score. In a run
with guidance it has ``rewarded_s``.

``{run}:finished:<id>`` is stored for the value worker, apart from the chunks, from a trajectory's
first value until the value worker has trained on it. A drop that keeps it from the critic ends it.
"""

from __future__ import annotations

from collections.abc import Callable


def prefix(run: str) -> str:
    """Return the prefix of a run's keys. Raises ValueError for a name that breaks the hash tag."""
    if not run or "{" in run or "}" in run:
        raise ValueError(f"run name is {run!r}; expected text without braces, since it becomes the keys' hash tag")
    return f"{{{run}}}:"


def _one(name: str) -> Callable[[str], str]:
    """Return run -> key."""
    return lambda run: prefix(run) + name


def _each(name: str) -> Callable[[str, str | int], str]:
    """Return (run, item) -> key of one trajectory, chunk, evaluation or topic."""
    return lambda run, item: f"{prefix(run)}{name}:{item}"


# The ledger. The scripts derive their own keys; these are the ones of Python.
counters = _one("counters")
spec = _one("spec")
settings = _one("settings")
claims = _one("claims")
version_history = _one("lineage")
finished_claims = _one("finished_claims")
finished_order = _one("finished")
finished_claim = _each("finished_claim")
dead = _one("dead")
trajectory = _each("trajectory")
chunk = _each("chunk")
due = _each("due")
finished = _each("finished")
evaluation = _each("evaluation")


def evaluation_samples(run: str, number: int) -> str:
    """Return the key of one evaluation's scored responses."""
    return evaluation(run, number) + ":samples"


# The registry.
epochs = _one("epochs")
endpoints = _one("endpoints")
endpoint_changes = _one("endpoint_changes")
mailboxes = _one("mailboxes")
heartbeats = _one("heartbeats")
versions = _one("versions")
reaching = _one("reaching")
seen = _one("seen")
failures = _one("failures")
fleet = _one("fleet")
settings_changes = _one("settings_changes")
weights = _one("weights")
relays = _one("relays")
relay_order = _one("relay_order")
run_status = _one("run_status")
notifications = _each("news")

# Joining hosts.
manifest = _one("manifest")
home = _one("home")

# Join tokens, and the CURVE keys that their hosts may use.
permitted = _one("keys")
permitted_of = _each("keys")
key_news = _one("news:keys")
keys_applied = _one("keys_applied")


def tokens(run: str) -> str:
    """Return the key of a run's join tokens, which no token may read."""
    return "tokens:" + prefix(run).removesuffix(":")
