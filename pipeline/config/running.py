"""What runs, where, and how patiently: the sections of a run file that change the system and not
what is learned.

Each setting says its unit. What one demands of another is checked in ``pipeline.config.schema``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from pipeline.config.base import Positive, Section


class RunSection(Section):
    """What this run is."""

    name: str = Field(
        default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="Folder and ledger prefix."
    )
    seed: int = Field(default=0, ge=0, description="Seeds data order, token sampling and the learner.")
    dir: Path = Field(default=Path("runs"), description="Runs live in <dir>/<name>.")
    num_updates: int = Field(
        default=100,
        ge=0,
        description="Updates to make; then the run finishes. 0: only the critic's first phase (pretrain-value).",
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
        description="Live windows at a weight swap: go on under the new weights, end first, or are cut and continued.",
    )
    block_tokens: Positive | None = Field(
        default=None, description="Prefixes are cached in blocks of so many; vLLM's choice when absent."
    )
    kv_cache_gb: Positive = Field(default=1, description="KV cache of one generator on a CPU, GiB.")
    parity_tolerance: float | None = Field(
        default=None,
        gt=0.0,
        description="Mean difference to the learner's log-probs after a swap, nats; absent: 1e-3 in fp32, 0.1 in bf16.",
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="Passed through to vLLM's EngineArgs, for example gpu_memory_utilization."
    )


class GenerationSection(Section):
    """Sampling."""

    engine: Literal["local", "vllm", "emulated"] = Field(
        default="local", description="emulated: for drills and benchmarks of the pipeline; see [emulation]."
    )
    vllm: VllmSection = VllmSection()
    num_slots: Positive = Field(default=64, description="Sequences decoded at once by one generator.")
    window_tokens: Positive = Field(default=512, description="W: a chunk is at most this long.")
    max_response_tokens: Positive = Field(
        default=2048, description="L: the response is cut here and counts as finished."
    )
    temperature: float = Field(default=1.0, gt=0.0, description="Of sampling, and of the learner's log-probs. DAPO: 1.")
    top_p: float = Field(
        default=1.0, gt=0.0, le=1.0, description="Only 1: the learner's log-probs are those of the whole distribution."
    )
    top_k: int = Field(default=0, ge=0, description="Only 0, which is off, for the same reason.")
    stop_token_ids: tuple[int, ...] = Field(default=(), description="Besides the tokenizer's end-of-sequence token.")
    swap: Literal["token", "window"] = Field(default="token", description="Where new weights are taken in flight.")
    kv_policy: Literal["keep", "recompute"] = Field(default="keep", description="The KV cache after a weight swap.")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Compute type of the engine.")
    device: str = Field(default="auto", description="auto takes cuda when torch sees one, else cpu.")
    threads: Positive = Field(default=1, description="Torch threads on a CPU.")
    steps_per_turn: Positive = Field(
        default=8, description="Decode steps between looks at mailboxes, weights and leases."
    )


class EmulationSection(Section):
    """Engines that compute nothing and take the time that they are told (sleeping, so that dozens
    fit on a core): for drills and benchmarks of the pipeline, never for training. Chosen by
    generation.engine and by the backend of learner, reference and value. With engine = local,
    decode_base_s and decode_slot_s hold the real engine back to the pace of an emulated device.

    Responses are drawn beforehand by (run.seed, trajectory): random tokens, and a length by the law
    below, cut at generation.max_response_tokens. No torch is loaded. Tokenizer and positions are
    those of model.path.
    """

    lengths: Literal["lognormal", "pareto", "constant"] = Field(
        default="lognormal", description="Law of the responses' lengths."
    )
    median_tokens: float = Field(default=256.0, ge=1.0, description="Median response, stop token included.")
    tail: float = Field(
        default=1.0, gt=0.0, description="lognormal: std of ln(length). pareto: exponent, smaller is heavier."
    )
    decode_base_s: float = Field(default=0.0, ge=0.0, description="a: a decode step takes a + b * live slots.")
    decode_slot_s: float = Field(default=0.0, ge=0.0, description="b.")
    prefill_token_s: float = Field(default=0.0, ge=0.0, description="A token of a context that is in no slot.")
    weights_load_s: float = Field(default=0.0, ge=0.0, description="A generator's pause when it takes weights.")
    weights_kb: Positive = Field(default=4, description="Size of the published weights.")
    scoring_token_s: float = Field(
        default=0.0, ge=0.0, description="A token (context included) of reference, value, or old log-probs."
    )
    step_s: float = Field(default=0.0, ge=0.0, description="An optimiser step of learner or value, besides its tokens.")
    training_token_s: float = Field(default=0.0, ge=0.0, description="A prompt or response token of such a step.")
    journal: Path | None = Field(
        default=None,
        description="Folder in which every generator writes down what it samples, for drills that kill it.",
    )
    value_cost: float = Field(default=1.0, ge=0.0, description="What a value model's step costs over the policy's.")


class CheckpointSection(Section):
    """Durability of learning. A batch is settled by the checkpoint that holds its effect."""

    every_updates: Positive = Field(default=10, description="Updates from one checkpoint to the next.")
    every_s: float = Field(
        default=300.0,
        gt=0.0,
        description="Also after an update, when the last one is so long ago, and ten times as long as it took to write. "
        "The first comes with the first update that ends later than 30 s after the learner's start.",
    )
    keep: Positive = Field(default=2, description="Older ones are removed after a newer one is complete.")


class ReplaySection(Section):
    """The update log, from which `headrace replay` makes updates again. RUNBOOK tells what it
    costs.
    """

    record: bool = Field(default=True, description="Log what every update was made of, and the digests of its weights.")
    keep_mb: Positive = Field(
        default=4096, description="Above it, what no kept checkpoint is followed by is removed, so early versions go."
    )


class SamplesSection(Section):
    """Responses that are kept for people, in ``samples.jsonl``: `headrace samples` and the report
    show them.
    """

    per_update: int = Field(
        default=2, ge=0, description="Responses of one update, of one group where there are; 0: none."
    )
    keep_updates: Positive = Field(
        default=50, description="Updates with samples, spread over the run; up to twice as many before half of them go."
    )
    max_chars: Positive = Field(default=4000, description="A longer prompt or response loses its middle.")


class LedgerSection(Section):
    """Where the durable ledger is."""

    url: str | None = Field(
        default=None,
        description="redis://, rediss://, unix:// or redis+sentinel://HOST,HOST/SERVICE; absent: REDIS_URL, else an embedded "
        "server of this run. Its password is written to no record.",
    )
    allow_plaintext: bool = Field(
        default=False, description="Let a redis:// URL leave this host unencrypted; else rediss:// is asked for."
    )
    max_memory_mb: Positive = Field(
        default=1024, description="Embedded server's limit; it refuses writes above, it never evicts."
    )
    watermark: float = Field(default=0.7, gt=0.0, lt=1.0, description="Admission stops above this share of the limit.")
    lease_s: float = Field(default=15.0, gt=0.0, description="A silent generator loses its trajectories after this.")
    scoring_deadline_s: float = Field(
        default=15.0, gt=0.0, description="An unscored chunk is handed out again after this."
    )
    max_attempts: Positive = Field(
        default=3, description="Failures of one role on one chunk before it is a dead letter."
    )
    outage_timeout_s: float = Field(
        default=300.0, gt=0.0, description="How long workers ride out a ledger that is away or full."
    )
    disk_timeout_s: float = Field(
        default=86400.0,
        gt=0.0,
        description="How long workers ride out a ledger whose disk takes no writes: until a person has made room.",
    )


class WireSection(Section):
    """Links between processes."""

    transport: Literal["ipc", "tcp"] = Field(
        default="ipc", description="ipc on one host; tcp with CURVE keys across hosts."
    )
    host: str = Field(default="127.0.0.1", description="Address that mailboxes bind when the transport is tcp.")
    advertise_host: str | None = Field(
        default=None,
        description="Name or address that other hosts are told, when the transport is tcp; absent: wire.host, or for a "
        "wildcard this host's name, or its address where the name means loopback. A host that needs its own sets "
        "HEADRACE_ADVERTISE_HOST.",
    )
    ports: str | None = Field(
        default=None,
        pattern=r"^[1-9]\d{0,4}(-[1-9]\d{0,4})?$",
        description="Ports to listen at, FIRST-LAST, when the transport is tcp: for firewalls. Any free port when absent.",
    )
    high_water_mark: Positive = Field(
        default=16, description="Messages a link may hold at each end: the back-pressure."
    )
    send_timeout_s: float = Field(
        default=10.0, gt=0.0, description="Then the chunk is left to the ledger's overdue index."
    )
    max_message_mb: Positive = Field(default=64, description="Larger messages are refused; a chunk is one message.")


class WeightsSection(Section):
    """How new weights reach the generators."""

    path: Literal["auto", "file", "wire"] = Field(
        default="auto",
        description="file: map the learner's file, on one host. wire: ask its endpoint. auto: the file where it is there, else "
        "the endpoint, which is open with wire.transport tcp.",
    )
    delta: bool = Field(
        default=True,
        description="Over the wire: only what changed since the version that is held. At small learning rates this is a "
        "fraction of dtype bfloat16; float32 changes nearly everywhere and goes whole.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Type in which weights are published.")
    keep: Positive = Field(default=2, description="Published versions kept, besides the frozen weights below adapters.")
    shared_memory: bool = Field(
        default=True,
        description="Publish, and keep what was fetched, in memory-backed storage where the host has some.",
    )
    poll_s: float = Field(
        default=1.0,
        gt=0.0,
        le=10.0,
        description="How often a generator looks for a newer version although it was told of none: what a lost notice costs.",
    )
    max_part_mb: Positive = Field(
        default=4, description="One part of a version sent to another host; below wire.max_message_mb."
    )
    fetch_timeout_s: float = Field(default=30.0, gt=0.0, description="For one part.")
    max_generator_lag: Positive = Field(
        default=2, description="Versions a live generator may lag before the learner waits for it."
    )
    ack_timeout_s: float = Field(default=30.0, gt=0.0, description="Then a generator that took no weights is fenced.")


class SupervisorSection(Section):
    """Restarts and shutdown."""

    max_restarts: int = Field(
        default=5,
        ge=0,
        description="Infrastructure failures of one worker (killed, frozen, no ledger, no disk) within restart_window_s that "
        "are mended by a restart; one more ends the run.",
    )
    restart_window_s: float = Field(default=60.0, gt=0.0, description="Time over which max_restarts counts.")
    max_data_failures: int = Field(
        default=5,
        ge=0,
        description="Errors of all workers of a role within data_failure_window_s that are mended by a restart; one more ends "
        "the run. What one failed at goes to the others.",
    )
    data_failure_window_s: float = Field(default=600.0, gt=0.0, description="Time over which max_data_failures counts.")
    backoff_s: float = Field(default=0.5, gt=0.0, description="Before the first restart; doubles up to 16 times this.")
    drain_timeout_s: float = Field(
        default=20.0,
        gt=0.0,
        description="In a two-phase stop, a worker that gets on with nothing for so long is killed. A piece of work that is "
        "known to take longer, and a checkpoint that is being written, are waited for.",
    )
    drain_ceiling_s: float = Field(
        default=3600.0, gt=0.0, description="A drain that takes longer in all is ended, whatever is still being done."
    )
    silent_after_s: float = Field(
        default=20.0,
        gt=0.0,
        description="A worker without a heartbeat for so long (they come every second) is replaced.",
    )
    stuck_after_s: float | None = Field(
        default=None,
        gt=0.0,
        description="A worker is replaced whose loop has not turned, or that computes, holds work, or leaves its role's work "
        "lying, without a piece of it done for so long. A piece is a layer of a pass, a decode step, a verdict, a file. "
        "Absent: five times the slowest piece so far of that kind of work, and a minute at least. A value is the most that is "
        "borne. Waiting for room, the ledger or weights is not counted; nor is waiting for credit or input with no work there.",
    )
    start_timeout_s: float = Field(
        default=300.0,
        gt=0.0,
        description="A worker that has not begun (imports, model, data) and loads nothing more for so long is replaced; so is "
        "one whose first call of a computation (compilation) does nothing for so long.",
    )
    checkpoint_timeout_s: float = Field(
        default=600.0, gt=0.0, description="A worker whose checkpoint does not grow by a file for so long is replaced."
    )
    metrics_port: int | None = Field(default=None, ge=1, le=65535, description="Prometheus on 127.0.0.1; absent: off.")


class FleetSection(Section):
    """How many workers of each role; usually from a fleet file of its own."""

    generator: Positive = Field(default=1, description="Processes that sample.")
    reward: Positive = Field(default=1, description="Processes that score finished responses.")
    reference: int = Field(default=1, ge=0, description="Started only when the algorithm needs it.")
    value: int = Field(default=1, ge=0, le=1, description="One process; started only when the algorithm has a critic.")
    max_workers: Positive | None = Field(
        default=None,
        description="One supervisor starts no more, learner and value included; a larger fleet is refused. Absent: 16 a core "
        "or one for each 256 MiB of memory, whichever is less, at least 8.",
    )
