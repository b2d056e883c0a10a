"""The walk in CONTRIBUTING is the way that a chunk takes: a small run is traced."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import protocol.codec
from protocol.trajectory import TrajectoryChunk
from tests.walk_trace import Encodings, traced

ROOT = Path(__file__).parents[1]
MAX_FILES = 45
MAX_BESIDE = 92
DECLARED = frozenset({"pipeline/ledger/contract.py"})
"""Types alone, without a function that runs."""

FORWARD = "inside a forward pass, which sees token ids and no chunk"
SERVER = "how the ledger's connection is made, named and numbered; it holds no chunk"
FLEET = "the worker's reports, waits and neighbours"
RECORDS = "a record for people or for replay, beside the way"
CHECK = "a check of generators, which trains on nothing"
ENDING = "evaluations, checkpoints and the run's end"
SNAPSHOTS = "the learner's state between updates, which holds no chunk"
PROMPTS = "prompts and text, before and after sampling"
VERIFIER = "which verifier judges, and the words in which it answers"
LOADING = "how a model lies in memory and on disk"
FORMULA = "a metric of the loss"
DETAIL = "a step of the file before it in the walk, without a decision of its own"

BESIDE = {
    "pipeline/preflight/memory_needs.py": SNAPSHOTS,
    "pipeline/runtime/machine.py": SNAPSHOTS,
    "pipeline/training/live_states.py": SNAPSHOTS,
    "pipeline/training/snapshots.py": SNAPSHOTS,
    "workers/engines/model/live_state.py": SNAPSHOTS,
    "pipeline/config/schema.py": "answers what a configuration asks for; here that tokens are sampled",
    "workers/learner/bad_data.py": "drops units that cannot be trained on",
    "pipeline/training/spikes.py": "sets the limits above which a step is a spike; off here",
    "workers/generator/self_check.py": "answers self-checks, whose tokens no chunk holds",
    "workers/snapshot_writer.py": SNAPSHOTS,
    "workers/engines/generation/local/attention.py": FORWARD,
    "workers/engines/generation/local/cache.py": FORWARD,
    "workers/engines/generation/local/dense.py": FORWARD,
    "workers/engines/generation/local/forward.py": FORWARD,
    "workers/engines/model/attention.py": FORWARD,
    "workers/engines/model/layers.py": FORWARD,
    "pipeline/ledger/redis/client.py": SERVER,
    "pipeline/ledger/redis/durable.py": SERVER,
    "pipeline/ledger/redis/errors.py": SERVER,
    "pipeline/ledger/redis/keys.py": SERVER,
    "pipeline/ledger/redis/request_ids.py": SERVER,
    "pipeline/ledger/url.py": SERVER,
    "pipeline/process/environment.py": FLEET,
    "pipeline/process/work.py": FLEET,
    "pipeline/runtime/clock.py": FLEET,
    "pipeline/runtime/context.py": FLEET,
    "pipeline/runtime/first_error.py": FLEET,
    "pipeline/runtime/flow_recorder.py": FLEET,
    "pipeline/runtime/log.py": FLEET,
    "pipeline/runtime/notifications.py": FLEET,
    "pipeline/runtime/open_messages.py": FLEET,
    "pipeline/runtime/registry/contract.py": FLEET,
    "pipeline/runtime/registry/redis_keys.py": FLEET,
    "pipeline/config/changing.py": FLEET,
    "workers/learner/new_settings.py": FLEET,
    "workers/scorers/code_trial.py": FLEET,
    "pipeline/runtime/registry/redis.py": FLEET,
    "pipeline/runtime/retry.py": FLEET,
    "pipeline/runtime/tracing.py": FLEET,
    "pipeline/runtime/worker_state.py": FLEET,
    "protocol/waiting.py": FLEET,
    "workers/generator/standstill.py": FLEET,
    "workers/learner/logprob_check.py": CHECK,
    "pipeline/observability/history.py": RECORDS,
    "pipeline/observability/regenerated_tokens.py": RECORDS,
    "pipeline/observability/samples.py": RECORDS,
    "pipeline/training/update_log/folder.py": RECORDS,
    "pipeline/training/update_log/frames.py": RECORDS,
    "pipeline/training/update_log/records.py": RECORDS,
    "workers/learner/claimed_chunks.py": RECORDS,
    "workers/learner/update_recorder.py": RECORDS,
    "workers/learner/update_row.py": RECORDS,
    "pipeline/config/load.py": RECORDS,
    "pipeline/config/public.py": RECORDS,
    "workers/engines/model/fingerprint.py": RECORDS,
    "pipeline/ledger/redis/views.py": ENDING,
    "pipeline/training/checkpoints.py": ENDING,
    "workers/checkpoint_writer.py": ENDING,
    "workers/engines/model/checkpoint_files.py": ENDING,
    "workers/engines/model/rng.py": ENDING,
    "workers/learner/evaluations.py": ENDING,
    "workers/learner/forecast.py": ENDING,
    "workers/learner/hopeless.py": ENDING,
    "workers/learner/work_wait.py": ENDING,
    "pipeline/data/mixture.py": PROMPTS,
    "pipeline/data/permutation.py": PROMPTS,
    "pipeline/data/source.py": PROMPTS,
    "pipeline/data/tokenizer.py": PROMPTS,
    "pipeline/rewards/registry.py": VERIFIER,
    "pipeline/rewards/verifier.py": VERIFIER,
    # a quick batch is over before they are counted
    "pipeline/process/descendants.py": "a verifier's processes are counted while it judges",
    "pipeline/weights/digest.py": LOADING,
    "pipeline/weights/tensorfile.py": LOADING,
    "workers/engines/model/check_weights.py": LOADING,
    "workers/engines/model/loading.py": LOADING,
    "workers/engines/generation/torch_weights.py": LOADING,
    "workers/engines/model/weights_file.py": LOADING,
    "workers/engines/training/trained_weights.py": LOADING,
    "pipeline/algorithms/divergence.py": FORMULA,
    "pipeline/algorithms/rows.py": FORMULA,
    "pipeline/algorithms/segments.py": DETAIL,
    "pipeline/config/import_path.py": "where a rule, a surrogate or a verifier is found",
    "pipeline/ledger/validation.py": DETAIL,
    "pipeline/ledger/version_history.py": DETAIL,
    "protocol/arrays.py": DETAIL,
    "protocol/ids.py": DETAIL,
    "protocol/limits.py": DETAIL,
    "protocol/validate.py": DETAIL,
    "workers/engines/model/micro_batches.py": DETAIL,
    "workers/engines/model/optimizers.py": DETAIL,
    "workers/engines/model/rate_decay.py": DETAIL,
    "protocol/headrace.py": "a verifier process is started by it",
}


def walk() -> list[str]:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    section = text.partition("## A walk through the system\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+\.py)` \| \S.* \|$", section, re.MULTILINE)


def test_the_walk_has_at_most_45_files_that_exist_each_once() -> None:
    files = walk()
    assert 20 < len(files) <= MAX_FILES
    assert len(set(files)) == len(files)
    assert [file for file in (*files, *BESIDE) if not (ROOT / file).is_file()] == []
    assert not set(files) & set(BESIDE)
    assert len(BESIDE) <= MAX_BESIDE


async def test_each_file_on_a_chunks_way_is_in_the_walk_or_beside_it_for_a_reason(
    tmp_path: Path, redis_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encodings = Encodings(protocol.codec._encode_body)
    monkeypatch.setattr(protocol.codec, "_encode_body", encodings)
    ran = await traced(tmp_path, redis_server)
    files = set(walk())
    assert sorted(ran - files - set(BESIDE)) == [], "name it in the walk, or in BESIDE with a reason"
    assert sorted(files - ran - DECLARED) == [], "the walk names a file that no chunk meets"
    sampled = [chunk for chunk in encodings.chunks if chunk.prompt.text]
    assert sampled and all(isinstance(chunk, TrajectoryChunk) for chunk in sampled)
    names = [str(chunk.id) for chunk in sampled]
    assert len(set(names)) == len(names), "a chunk is encoded once for its links and for the ledger"
