"""The sections of a run file that set what runs, where, and with which limits.

They change the system, not what is learned. Rules across settings: ``pipeline.config.schema``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from pipeline.config.base import Positive, Section


class RunSection(Section):
    """Identity and length of this run."""

    name: str = Field(
        default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="Name of the folder and ledger prefix."
    )
    seed: int = Field(default=0, ge=0, description="Seed of data order, token sampling and the learner.")
    dir: Path = Field(default=Path("runs"), description="Runs live in <dir>/<name>.")
    num_updates: int = Field(
        default=100,
        ge=0,
        description="The run finishes after this many updates. 0: only train the critic (pretrain-value).",
    )


class VllmSection(Section):
    """vLLM, when ``generation.engine`` is vllm; versions: pipeline/preflight/vllm.py."""

    mode: Literal["auto", "in-process", "background"] = Field(
        default="auto", description="auto: in-process on a CPU, background (vLLM's async engine) on GPUs."
    )
    tensor_parallel_size: Positive = Field(default=1, description="GPUs that share each layer; divides the heads.")
    data_parallel_size: Positive = Field(default=1, description="Copies of the model behind one generator.")
    pause: Literal["keep", "wait", "abort"] = Field(
        default="keep",
        description="Live windows at a weight swap: continue with the new weights, end first, or are cut and continued.",
    )
    block_tokens: Positive | None = Field(
        default=None, description="Tokens of one block of the prefix cache. Absent: vLLM's choice."
    )
    kv_cache_gb: Positive = Field(default=1, description="KV cache of one generator on a CPU, GiB.")
    parity_tolerance: float | None = Field(
        default=None,
        gt=0.0,
        description="Largest mean difference to the learner's log-probs after a swap, nats. Absent: 1e-3 in float32, 0.1 in "
        "bfloat16.",
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="Passed through to vLLM's EngineArgs, for example gpu_memory_utilization."
    )


class GenerationSection(Section):
    """How responses are sampled."""

    engine: Literal["local", "vllm", "emulated"] = Field(
        default="local", description="emulated: for drills and benchmarks of the pipeline, see [emulation]."
    )
    vllm: VllmSection = VllmSection()
    num_slots: Positive = Field(default=64, description="Sequences decoded at once by one generator.")
    window_tokens: Positive = Field(default=512, description="W, the largest length of a chunk.")
    max_response_tokens: Positive = Field(
        default=2048, description="L. A response is cut at this length and counts as finished."
    )
    temperature: float = Field(default=1.0, gt=0.0, description="Of sampling, and of the learner's log-probs. DAPO: 1.")
    top_p: float = Field(
        default=1.0, gt=0.0, le=1.0, description="Must be 1: the learner's log-probs are of the whole distribution."
    )
    top_k: int = Field(default=0, ge=0, description="Must be 0 (off), for the same reason.")
    stop_token_ids: tuple[int, ...] = Field(default=(), description="Besides the tokenizer's end-of-sequence token.")
    swap: Literal["token", "window"] = Field(
        default="token", description="New weights are loaded between two tokens, or between two windows."
    )
    kv_policy: Literal["keep", "recompute"] = Field(default="keep", description="The KV cache after a weight swap.")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Compute type of the engine.")
    device: str = Field(default="auto", description="auto: cuda if torch finds a GPU, else cpu.")
    threads: Positive = Field(default=1, description="Torch threads on a CPU.")
    steps_per_turn: Positive = Field(
        default=8, description="Decode steps between two checks of mailboxes, weights and leases."
    )


class EmulationSection(Section):
    """Engines that compute nothing: for drills and benchmarks of the pipeline, never for training.
    They sleep for the times set here, so that dozens fit on a core. generation.engine and the
    backends of learner, reference and value choose them. With engine = local, decode_base_s and
    decode_slot_s slow the real engine down to an emulated device's pace.

    Responses are drawn beforehand from (run.seed, trajectory): random tokens, with lengths from the
    distribution below, cut at generation.max_response_tokens. No torch is loaded. Tokenizer and
    positions are those of model.path."""

    lengths: Literal["lognormal", "pareto", "constant"] = Field(
        default="lognormal", description="Distribution of response lengths."
    )
    median_tokens: float = Field(default=256.0, ge=1.0, description="Median response, stop token included.")
    tail: float = Field(
        default=1.0, gt=0.0, description="lognormal: std of ln(length). pareto: exponent, smaller is heavier."
    )
    decode_base_s: float = Field(default=0.0, ge=0.0, description="a: a decode step takes a + b * live slots.")
    decode_slot_s: float = Field(default=0.0, ge=0.0, description="b.")
    prefill_token_s: float = Field(
        default=0.0, ge=0.0, description="Time of a context token that is in no slot's cache."
    )
    weights_load_s: float = Field(default=0.0, ge=0.0, description="Pause of a generator that loads new weights.")
    weights_kb: Positive = Field(default=4, description="Size of the published weights.")
    scoring_token_s: float = Field(
        default=0.0, ge=0.0, description="Time of a token (context included) of reference, value, or old log-probs."
    )
    step_s: float = Field(
        default=0.0, ge=0.0, description="Time of an optimiser step of learner or value, besides its tokens."
    )
    training_token_s: float = Field(
        default=0.0, ge=0.0, description="Time of a prompt or response token of such a step."
    )
    journal: Path | None = Field(
        default=None, description="Folder in which every generator records what it samples, for drills that kill it."
    )
    value_cost: float = Field(
        default=1.0, ge=0.0, description="Cost of a value model's step, relative to the policy's."
    )


class CheckpointSection(Section):
    """Durability of learning. A batch is settled by the checkpoint that contains its effect."""

    every_updates: Positive = Field(default=10, description="Updates from one checkpoint to the next.")
    every_s: float = Field(
        default=300.0,
        gt=0.0,
        description="Time after which an update also writes a checkpoint, at least ten times the last write's duration. "
        "The first follows the first update that ends over 30 s after the learner's start.",
    )
    keep: Positive = Field(default=2, description="Checkpoints kept. The rest go once a newer one is complete.")


class ReplaySection(Section):
    """The update log. `headrace replay` makes updates again from it. Costs: ops/RUNBOOK.md."""

    record: bool = Field(default=True, description="Record every update's inputs and the digests of its weights.")
    keep_mb: Positive = Field(
        default=4096,
        description="Above this size, log segments older than the oldest kept checkpoint are deleted. Those versions can no "
        "longer be replayed.",
    )


class SamplesSection(Section):
    """Responses kept for people in ``samples.jsonl``, for `headrace samples` and the report."""

    per_update: int = Field(
        default=2, ge=0, description="Responses kept of one update, of one group where there are groups. 0: none."
    )
    keep_updates: Positive = Field(
        default=50, description="Updates with samples, spread over the run. At twice as many, half of them are removed."
    )
    max_chars: Positive = Field(default=4000, description="The middle of a longer prompt or response is left out.")


class LedgerSection(Section):
    """The durable ledger: where it is, its limits and its deadlines."""

    url: str | None = Field(
        default=None,
        description="redis://, rediss://, unix:// or redis+sentinel://HOST,HOST/SERVICE. Absent: REDIS_URL, else an embedded "
        "server of this run. The password is written to no record.",
    )
    allow_plaintext: bool = Field(
        default=False, description="Allow a redis:// URL of another host, unencrypted. Off: rediss:// is required."
    )
    max_memory_mb: Positive = Field(
        default=1024, description="Limit of the embedded server. Above it writes are refused; nothing is evicted."
    )
    watermark: float = Field(default=0.7, gt=0.0, lt=1.0, description="Admission stops above this share of the limit.")
    lease_s: float = Field(default=15.0, gt=0.0, description="A generator silent for this long loses its trajectories.")
    scoring_deadline_s: float = Field(
        default=15.0, gt=0.0, description="A chunk unscored for this long is handed out again."
    )
    max_attempts: Positive = Field(
        default=3, description="Failures of one role on one chunk before the chunk is a dead letter."
    )
    outage_timeout_s: float = Field(
        default=300.0, gt=0.0, description="How long workers wait for a ledger that is away or full."
    )
    disk_timeout_s: float = Field(
        default=86400.0,
        gt=0.0,
        description="How long workers wait for a ledger with a full disk: until an operator has made room.",
    )


class WireSection(Section):
    """Links between processes, and their limits."""

    transport: Literal["ipc", "tcp"] = Field(
        default="ipc", description="ipc on one host; tcp with CURVE keys across hosts."
    )
    host: str = Field(default="127.0.0.1", description="Address that mailboxes bind when the transport is tcp.")
    advertise_host: str | None = Field(
        default=None,
        description="Name or address given to other hosts, when the transport is tcp. Absent: wire.host. For a wildcard: "
        "this host's name, or its address where the name means loopback. HEADRACE_ADVERTISE_HOST sets it for one host.",
    )
    ports: str | None = Field(
        default=None,
        pattern=r"^[1-9]\d{0,4}(-[1-9]\d{0,4})?$",
        description="Ports to listen on, FIRST-LAST, when the transport is tcp: for firewalls. Absent: any free port.",
    )
    high_water_mark: Positive = Field(
        default=16, description="Most messages queued at each end of a link: the back-pressure."
    )
    send_timeout_s: float = Field(
        default=10.0,
        gt=0.0,
        description="Limit of one send. After it the ledger hands the chunk out again, once overdue.",
    )
    max_message_mb: Positive = Field(default=64, description="Larger messages are refused. A chunk is one message.")


class WeightsSection(Section):
    """How new weights reach the generators."""

    path: Literal["auto", "file", "wire"] = Field(
        default="auto",
        description="file: map the learner's file, on one host. wire: fetch it from the learner's endpoint, which needs "
        "wire.transport tcp. auto: prefer the file.",
    )
    delta: bool = Field(
        default=True,
        description="Over the wire: send only what changed since the version held. At small learning rates this is a "
        "fraction of bfloat16 weights. float32 weights change nearly everywhere and go whole.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Type in which weights are published.")
    keep: Positive = Field(
        default=2, description="Published versions kept, besides the frozen base weights of adapters."
    )
    shared_memory: bool = Field(
        default=True, description="Publish and keep fetched weights in memory-backed storage, where the host has some."
    )
    poll_s: float = Field(
        default=1.0,
        gt=0.0,
        le=10.0,
        description="Time between a generator's own checks for a newer version. A lost notice costs at most this delay.",
    )
    max_part_mb: Positive = Field(
        default=4, description="Largest part of a version sent to another host; below wire.max_message_mb."
    )
    fetch_timeout_s: float = Field(default=30.0, gt=0.0, description="Limit of fetching one part.")
    max_generator_lag: Positive = Field(
        default=2, description="Versions that a live generator may lag before the learner waits for it."
    )
    ack_timeout_s: float = Field(
        default=30.0, gt=0.0, description="A generator that took no weights for this long is fenced."
    )


class SupervisorSection(Section):
    """Restarts, timeouts and shutdown."""

    max_restarts: int = Field(
        default=5,
        ge=0,
        description="Infrastructure failures of one worker (killed, frozen, no ledger, no disk) within restart_window_s that "
        "are repaired by a restart. One more ends the run.",
    )
    restart_window_s: float = Field(default=60.0, gt=0.0, description="Time over which max_restarts counts.")
    max_data_failures: int = Field(
        default=5,
        ge=0,
        description="Errors of all workers of a role within data_failure_window_s that are repaired by a restart. One more "
        "ends the run. Failed work goes to the role's other workers.",
    )
    data_failure_window_s: float = Field(default=600.0, gt=0.0, description="Time over which max_data_failures counts.")
    backoff_s: float = Field(default=0.5, gt=0.0, description="Before the first restart. Doubles up to 16 times this.")
    drain_timeout_s: float = Field(
        default=20.0,
        gt=0.0,
        description="In a two-phase stop, a worker without progress for this long is killed. The stop waits for work known "
        "to take longer, and for a checkpoint that is being written.",
    )
    drain_ceiling_s: float = Field(
        default=3600.0, gt=0.0, description="A drain that takes longer in all is ended, whatever still runs."
    )
    silent_after_s: float = Field(
        default=20.0,
        gt=0.0,
        description="A worker without a heartbeat for this long is replaced. Heartbeats come every second.",
    )
    stuck_after_s: float | None = Field(
        default=None,
        gt=0.0,
        description="A worker is replaced if its event loop has not turned for this long. Or if it computes, holds work, or "
        "leaves its role's work waiting, and finishes no piece of it for this long. A piece is a layer of a pass, a decode "
        "step, a verdict, a file. Absent: five times the slowest piece so far of that kind, at least a minute. Waiting for "
        "room, the ledger or weights does not count. Nor does waiting for credit or input when there is none.",
    )
    start_timeout_s: float = Field(
        default=300.0,
        gt=0.0,
        description="A worker that has not begun (imports, model, data) and loads nothing more for this long is replaced. So "
        "is a worker whose first call of a computation (compilation) makes no progress for this long.",
    )
    checkpoint_timeout_s: float = Field(
        default=600.0, gt=0.0, description="A worker whose checkpoint gains no file for this long is replaced."
    )
    metrics_port: int | None = Field(
        default=None, ge=1, le=65535, description="Port of Prometheus metrics on 127.0.0.1. Absent: off."
    )


class FleetSection(Section):
    """How many workers of each role. Usually a fleet file of its own."""

    generator: Positive = Field(default=1, description="Processes that sample.")
    reward: Positive = Field(default=1, description="Processes that score finished responses.")
    reference: int = Field(default=1, ge=0, description="Processes. They start only if the algorithm needs them.")
    value: int = Field(default=1, ge=0, le=1, description="One process. It starts only if the algorithm has a critic.")
    max_workers: Positive | None = Field(
        default=None,
        description="Largest number of workers of one supervisor, learner and value included. A larger fleet is refused. "
        "Absent: 16 a core or one for each 256 MiB of memory, whichever is less, at least 8.",
    )
