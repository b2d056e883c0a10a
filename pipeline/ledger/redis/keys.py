"""Every key that a run keeps in Redis: name, type, meaning, lifetime.

All keys of a run have the hash tag ``{run}``, so a cluster keeps the whole run in one slot. A script is
routed by its one key (``counters``) and derives all others from that key's tag. They are in the same
slot, which one node serves, so deriving keys is safe in a cluster.

An incarnation is named like ``generator-0#3``, a trajectory ``t.12.3``, a chunk ``t.12.3.0``. A *unit* is
a group number, a trajectory id or a chunk id, depending on the run's unit. *Order* is the order of
admission as one number: the group's number; ``group * group_size + member``; and for chunks that times
65,536 plus the chunk's index.

| key | type | meaning | lifetime |
|---|---|---|---|
| ``{run}:spec`` | hash | the ledger's specification, setting -> text | the run |
| ``{run}:settings`` | string | the same as one MessagePack map, for the scripts | the run |
| ``{run}:counters`` | hash | version, credit, bytes, admitted, trained, dropped:reason, stored:<who>, spent:<what> | the run |
| ``{run}:tallies`` | hash | ended work, by how: units by staleness, sums of responses' length and difficulty | the run |
| ``{run}:lives`` | hash | ended trajectory -> its packed life, for the newest 10,000 | the run |
| ``{run}:lives_order`` | list | their names, newest first | the run |
| ``{run}:moved`` | list | trajectories whose work in flight changed (below), newest first | the run |
| ``{run}:epochs`` | hash | worker -> newest epoch; written by the registry, read by every script as the fence | the run |
| ``{run}:groups`` | zset | numbers of groups that are not settled | the run |
| ``{run}:group:<n>`` | hash | prompt, finals, missing, oldest, live, dropped, state, and more (below) | until settled |
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
| ``{run}:holders`` | zset | incarnations that hold trajectories, by when their lease ends | while so |
| ``{run}:held:<incarnation>`` | set | trajectories that an incarnation holds | while so |
| ``{run}:asked:<incarnation>`` | hash | the last numbered request of each kind and its answer, for repeats | one day |
| ``{run}:due:<field>`` | zset | chunks that lack a field, by when they are handed out again | until scored |
| ``{run}:claims`` | hash | claims that are not settled, id -> policy version | until settled |
| ``{run}:claim:<id>`` | zset | units of a claim, by order | until settled |
| ``{run}:lineage`` | zset | restarts as ``version:updates``, by version (``pipeline.ledger.version_history``) | the run |
| ``{run}:milestones`` | zset | ``updates:`` and what was trained by then, one per checkpoint, at most 1,000 | the run |
| ``{run}:finished:<id>`` | hash | final, reward, ``value:<index>``, num_chunks, num_values, bytes, state, claim | (below) |
| ``{run}:finished`` | zset | those of them that the value worker may claim, by order | while so |
| ``{run}:finished_claims`` | set | the value worker's claims that are not settled | until settled |
| ``{run}:finished_claim:<id>`` | zset | trajectories of such a claim, by order | until settled |
| ``{run}:shown:<kind>`` | list | 16 responses of evaluations, or of groups without signal, for people to read | until taken |
| ``{run}:dead`` | list | dead letters, newest first, at most 1,000 | the run |
| ``{run}:evaluation_open`` | zset | evaluation trajectories without a holder, by evaluation, prompt and sample | while so |
| ``{run}:evaluation:<n>`` | hash | request, number of failed responses | the run |
| ``{run}:evaluation:<n>:samples`` | hash | ``prompt.sample`` -> accuracy, reward, tokens, oldest and newest version | the run |
| ``{run}:endpoints`` | hash | registry: worker -> role, endpoint, public key | the run |
| ``{run}:mailboxes`` | zset | registry: workers with a mailbox, by when they last gave a sign of life | until it departs |
| ``{run}:endpoint_changes`` | zset | registry: workers by the number of their mailbox's last change | the run |
| ``{run}:heartbeats`` | hash | registry: worker -> its last heartbeat | until it departs |
| ``{run}:versions`` | zset | registry: workers by role and policy version, as one number | until it departs |
| ``{run}:reaching`` | set | registry: generators that reach their scorers | while so |
| ``{run}:seen`` | zset | registry: workers by the server's time at their last sign of life | until it departs |
| ``{run}:failures`` | zset | registry: errors that ended workers, by the server's time, the newest 32 | the run |
| ``{run}:fleet`` | string | registry: the desired number of workers by role | the run |
| ``{run}:settings_changes`` | list | registry: changes of the run's settings, JSON, in order | the run |
| ``{run}:weights`` | string | registry: the newest published weights | the run |
| ``{run}:relays`` | hash | registry: worker -> epoch, and where it serves weights | while it gives signs of life |
| ``{run}:relay_order`` | zset | registry: relays in order of arrival | while so |
| ``{run}:run_status`` | string | registry: the run's state and the sentence that explains it | the run |
| ``{run}:manifest`` | string | what another host needs to join: code version, settings, files | until the run's next start |
| ``{run}:home`` | stream | joined hosts' logs and tallies on their way to the run's folder, at most 256 | until received |
| ``{run}:news:<topic>`` | stream | registry: one entry, written with every change of weights, endpoints or run | the run |
| ``{run}:keys`` | set | join tokens whose hosts' CURVE keys are permitted; also ``run`` and ``owner`` | the run |
| ``{run}:keys:<token>`` | hash | public CURVE key -> host, of the hosts that joined with this token | until revoked |
| ``{run}:keys_applied`` | string | the newest of ``news:keys`` that the run's host has in its folder | the run |
| ``{run}:news:keys`` | stream | one entry, written with every change of permitted keys | the run |
| ``tokens:{run}`` | hash | join token -> its role and the digest of its secret, JSON | until revoked |

``{run}:moved`` keeps at least the newest 32,768 names, for audits that run meanwhile. The counter ``moved``
counts all names ever written.

Only ``tokens:{run}`` does not begin with the tag, since a join token may read every key that does.

``{run}:group:<n>`` also has admitted_s, scored, accuracy, mixed and correct (the sum of accuracies in
millionths). While a scorer judges the whole group, it has ``judged_by`` and ``judged_until``. ``unjudged``
is the number of members that never got a verdict; each of their trajectories has it too.

``{run}:trajectory:<id>`` also has spoiled, and ``lease:<n>`` for the last four leases. Its ``state`` is
``waiting`` while its environment has not answered; ``opening`` says that its first chunk has no tokens. With
unit chunk it has ``past:<n>`` for chunks that have left, and ``last_turn``, the answer to ``last``. A unit
has ``ready_s``, ``claimed_s`` and ``masked``, the number of its masked responses. A chunk has
``from:<field>`` for each score, in a run with guidance ``rewarded_s``, and ``turned_s`` if its turn was the
last.

``{run}:finished:<id>`` is stored for the value worker, separately from the chunks, from a trajectory's
first value until the value worker has trained on it, or a drop keeps it from the critic.
"""

from __future__ import annotations

from collections.abc import Callable


def prefix(run: str) -> str:
    """Return the prefix of a run's keys. Raises ValueError for a name that would break the hash tag."""
    if not run or "{" in run or "}" in run:
        raise ValueError(f"run name is {run!r}; expected text without braces, since it becomes the keys' hash tag")
    return f"{{{run}}}:"


def _one(name: str) -> Callable[[str], str]:
    """Return a function of the run."""
    return lambda run: prefix(run) + name


def _each(name: str) -> Callable[[str, str | int], str]:
    """Return a function of the run and a trajectory, chunk, evaluation or topic."""
    return lambda run, item: f"{prefix(run)}{name}:{item}"


# The ledger: only the keys that Python uses, since scripts derive theirs.
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
