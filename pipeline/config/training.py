"""The sections of a run file about models, data, staleness, rewards and the reference policy.

Each setting names its unit and the source of its default. ``pipeline.config.schema`` has the rules
across settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import model_validator

from pipeline.config.base import ComputeType, Positive, ReadIf, Recompute, Section, required, section, setting
from pipeline.config.catalogue import ScoringBackendName
from pipeline.config.data_sets import RECORDED, ChatVariables, ColumnsSection, DataPath, DataSetSection
from pipeline.config.import_path import is_import_path
from pipeline.config.learning import UNREFERENCED
from pipeline.config.rewards import EndpointSection, PartName, RewardFunctionSection
from pipeline.config.runtime import SAMPLES

REFERENCED: Final = ReadIf(lambda run: run.has_reference, UNREFERENCED)
_SOFT = ReadIf(lambda run: "soft" in run.reward.overlong, "reward.overlong is not soft")
_VLLM = ReadIf(lambda run: run.reference.backend == "vllm", "reference.backend is not vllm")


class ModelSection(Section):
    """The policy to start from."""

    path: Path = required(
        "Folder of a Hugging Face causal LM and its tokenizer, or hf://OWNER/NAME.",
        also="model_name model_name_or_path pretrain",
    )
    dtype: ComputeType = setting(
        "auto",
        "Compute type of the learner; what it trains stays float32. auto: bfloat16 where a short measurement at the start "
        "finds it faster and close to float32; a resumed run keeps what was found.",
        also="bf16 torch_dtype param_dtype optimization_dtype",
    )
    device: str = setting("auto", "auto: cuda if torch finds a GPU, else cpu.")
    reference_path: Path | None = setting(
        None, "Folder of the frozen reference policy. Default: the start policy.", also="ref_model", read_if=REFERENCED
    )
    gradient_checkpointing: Recompute = setting(
        "auto",
        "Layers, from the first on, whose activations are recomputed in the backward pass: less memory, up to a third more "
        "time. A number, or true for all. auto: as few as the GPU's memory needs, and none on a CPU.",
        also="enable_gradient_checkpointing gradient_checkpointing_enable",
    )


class DataSection(Section):
    """Prompts for training and evaluation."""

    train: tuple[DataPath, ...] = setting(
        (),
        "JSONL or Parquet files in the format of Headrace, GSM8K, TRL, verl or OpenRLHF. Other columns are kept. A path "
        "may contain * and ?, or be hf://datasets/OWNER/NAME/FILE, s3://BUCKET/FILE, gs://BUCKET/FILE or "
        "reasoning-gym://DATASET?SETTING=VALUE.",
        also="dataset dataset_name prompt_data prompt_dataset train_files train_dataset",
    )
    sets: tuple[DataSetSection, ...] = setting((), "Several data sets with weights, in place of train.")
    responses: tuple[DataPath, ...] = setting(
        (),
        "Files of questions with recorded responses and verdicts, in place of train: the run learns from these "
        "instead of sampling. pipeline/data/README.md.",
    )
    response_verifier: str = setting(
        "recorded",
        "Verifier of data.responses. recorded: each line's verdict. Another one judges the responses again.",
        read_if=RECORDED,
    )
    columns: ColumnsSection = ColumnsSection()
    evaluation: tuple[DataPath, ...] = setting(
        (), "Files of held-out prompts; never trained on.", also="eval_dataset val_files"
    )
    allow_overlap: bool = setting(
        False, "Accept evaluation prompts that are also training prompts. The evaluation is then not held out."
    )
    verifier: str = setting(
        "arithmetic",
        "Verifier of data lines that name none.",
        also="compute_score reward_fn reward_funcs reward_manager",
        read_if=SAMPLES,
    )
    max_prompt_tokens: Positive = setting(
        2048, "Longer prompts are reported and skipped.", also="max_prompt_length prompt_length prompt_max_len"
    )
    max_answer_chars: Positive = setting(
        10_000, "Prompts with a longer answer are reported and skipped, since every chunk carries the answer."
    )
    epochs: int | None = setting(
        None,
        "Passes over the training prompts. Default: endless.",
        ge=1,
        unit="passes",
        also="num_train_epochs total_epochs num_episodes",
    )
    shuffle: bool = setting(
        True, "Shuffle the training prompts in each epoch, seeded by run.seed.", also="shuffle_dataset"
    )
    curriculum: Literal["none", "easy-first"] = setting(
        "none", "easy-first: each epoch goes from the easiest tenth to the hardest, shuffled within tenths."
    )
    min_difficulty: float | None = setting(None, "Easier training prompts are reported and skipped.", unit="difficulty")
    max_difficulty: float | None = setting(None, "Harder training prompts are reported and skipped.", unit="difficulty")
    chat: Literal["auto"] | bool = setting(
        "auto",
        "Whether a plain prompt becomes a user message in the model's chat template; lists of messages always use "
        "it. auto: if "
        "the tokenizer has one, prompt_template is absent, and the prompt does not begin with a special token.",
        also="apply_chat_template",
    )
    system_prompt: str | None = setting(None, "First message of conversations that have no system message.")
    chat_variables: ChatVariables = setting(
        {},
        "Variables of the chat template, for example enable_thinking = false.",
        also="chat_template_kwargs apply_chat_template_kwargs",
    )
    prompt_template: str = setting(
        "{prompt}",
        "Template that plain prompts are inserted into. If given, the chat template is used only with "
        "data.chat = true.",
        also="input_template",
    )

    @property
    def reads_difficulty(self) -> bool:
        """Whether every training prompt needs a difficulty."""
        return self.curriculum != "none" or self.min_difficulty is not None or self.max_difficulty is not None

    def set_of(self, prompt_id: str) -> DataSetSection | None:
        """Return the training set that a prompt belongs to, since its id begins with the set's
        name; None without sets."""
        return next((one for one in self.sets if prompt_id.startswith(f"{one.name}/")), None)

    @model_validator(mode="after")
    def _has_data(self) -> Self:
        given = [name for name in ("train", "sets", "responses") if getattr(self, name)]
        if not given and "train" not in self.model_fields_set:
            raise ValueError(
                "data.train and data.sets are both missing; give the files in data.train, or each data set in [[data.sets]]; "
                "or recorded responses in data.responses"
            )
        if len(given) > 1:
            raise ValueError(
                f"{' and '.join(f'data.{name}' for name in given)} are both given; expected one: give the files in data.train, "
                "or each data set in [[data.sets]], or recorded responses in data.responses"
            )
        low, high = self.min_difficulty, self.max_difficulty
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"data.min_difficulty is {low}, above max_difficulty {high}; no prompt would be left: lower it"
            )
        names = [one.name for one in self.sets]
        if len(names) > len(set(names)):
            raise ValueError(f"data.sets has the names {', '.join(names)}; give each set a different name")
        for name in names:
            if inner := next((other for other in names if other.startswith(f"{name}/")), None):
                raise ValueError(
                    f"data.sets has the names {name} and {inner}, but prompt ids begin with these names, so no name "
                    f"may be another's plus a slash and more: rename one"
                )
        if self.sets and sum(one.weight for one in self.sets) <= 0.0:
            raise ValueError("the weights of data.sets sum to 0, so no prompt would be drawn; set one above 0")
        return self


class StalenessSection(Section):
    """How far sampling may run ahead of learning."""

    eta: int = setting(
        2,
        "Largest version lag. 0 is the synchronous baseline.",
        ge=0,
        unit="policy versions",
        also="staleness_threshold async_queue_size max_off_policy_steps max_off_policy_threshold",
    )
    late: Literal["wait", "drop"] = setting(
        "wait", "What happens to work that would become too stale: the learner waits for it, or it is dropped."
    )


class RewardModelSection(Section):
    """A reward model, whose score of a finished response is a part of the reward:
    pipeline/rewards/README.md."""

    path: Path = required(
        "Folder of a Hugging Face sequence classifier with one label, and its tokenizer.", also="reward_pretrain"
    )
    weight: float = setting(1.0, "The part `model` of the reward is weight * (score - center).", unit="factor")
    center: float = setting(0.0, "Score of a response that is neither good nor bad.", unit="reward model's score")
    max_tokens: Positive | None = setting(
        None, "Longest conversation, in this model's tokens. Default: its number of positions or its tokenizer's limit."
    )
    micro_batch_tokens: Positive = setting(16384, "Tokens of one forward pass, padding included.")
    dtype: Literal["float32", "bfloat16"] = setting("float32", "Type of its weights and computation.")
    device: str = setting("auto", "auto: cuda if torch finds a GPU, else cpu.")
    threads: Positive = setting(1, "Torch threads on a CPU.", unit="threads")


class RewardSection(Section):
    """How finished responses are scored."""

    model: RewardModelSection | None = setting(None, "Also score every response with a reward model.")

    overlong: Literal["none", "soft", "filter", "soft+filter"] = setting(
        "none",
        "Over-long responses get a soft penalty, or no loss (filter); with filter, a group of only such responses "
        "is dropped. "
        "DAPO section 3.4.",
        also="overlong_buffer mask_truncated_completions",
    )
    overlong_cache_tokens: int = setting(0, "L_cache of DAPO eq. 13.", ge=0, also="overlong_buffer_len", read_if=_SOFT)
    overlong_factor: float = setting(
        1.0,
        "Largest penalty of an over-long response.",
        ge=0.0,
        unit="reward",
        also="penalty_factor overlong_penalty_factor",
        read_if=_SOFT,
    )
    correct: float = setting(1.0, "Reward of a correct answer.", unit="reward")
    wrong: float = setting(-1.0, "Reward of a wrong answer.", unit="reward")
    timeout_s: float = setting(
        5.0,
        "CPU time of one verifier call, including processes that it starts. Beyond it there is no verdict.",
        gt=0.0,
    )
    wait_s: float | None = setting(
        None,
        "Longest wait for a verifier call, not counting time when the machine stood still. Beyond it there is no "
        "verdict. Default: three times timeout_s.",
        gt=0.0,
    )
    late: Literal["retry", "wrong"] = setting(
        "retry",
        "A response without a verdict in time is judged again, and left out of its group after ledger.max_attempts "
        "(retry), or counts as wrong at once, only in training (wrong).",
    )
    processes: Positive = setting(1, "Verifier processes of one reward worker.", unit="processes")
    max_batch: Positive = setting(
        64, "Responses received at once. Verifiers inside the worker judge them in one call.", unit="responses"
    )
    max_in_flight: Positive = setting(
        256, "Responses that one reward worker judges concurrently. A slow one does not delay others.", unit="responses"
    )
    verifiers: tuple[str, ...] = setting(
        (), "Import paths that data lines may name, besides data.verifier. Data never chooses code to run by itself."
    )
    functions: dict[PartName, RewardFunctionSection] = setting(
        {},
        "Further rewards by name, each a table [reward.functions.NAME]. History, report and status show each.",
        also="reward_weights reward_funcs_weights",
    )
    endpoints: dict[PartName, EndpointSection] = setting(
        {},
        "Judges and rewards behind HTTP by name, each a table [reward.endpoints.NAME]; verifiers endpoint/NAME.",
        also="remote_rm_url remote_url reward_api_url",
    )
    path: tuple[Path, ...] = setting(
        (), "Folders with your verifiers' modules; searched after PYTHONPATH and what is installed."
    )

    @property
    def longest_wait_s(self) -> float:
        """``wait_s``, or its default, in seconds."""
        return 3.0 * self.timeout_s if self.wait_s is None else self.wait_s


class ReferenceVllmSection(Section):
    """Settings of vLLM, for reference.backend = "vllm". It runs in the reference worker's process."""

    tensor_parallel_size: Positive = setting(1, "GPUs that share each layer; divides the heads.", unit="GPUs")
    kv_cache_gb: Positive = setting(1, "KV cache of one reference worker on a CPU, GiB.")
    engine_args: dict[str, Any] = setting({}, "Passed to vLLM's EngineArgs, for example gpu_memory_utilization.")


class ReferenceSection(Section):
    """Log-probs of the frozen reference policy. The role starts only if algorithm.kl_coefficient is
    above 0 or `always` is on."""

    backend: ScoringBackendName = setting(
        "torch",
        "torch; vllm: prompt log-probs of vLLM, in its own environment; or package.module:function of your own.",
    )
    vllm: ReferenceVllmSection = section(ReferenceVllmSection(), read_if=_VLLM)
    always: bool = setting(False, "Compute them for the KL metric even if no loss needs them.")
    micro_batch_tokens: Positive = setting(
        8192, "Tokens of one forward pass.", also="log_prob_micro_batch_size_per_gpu"
    )
    device: str = setting("auto", "auto: cuda if torch finds a GPU, else cpu.")
    threads: Positive = setting(1, "Torch threads on a CPU.", unit="threads")

    @property
    def has_own_engine(self) -> bool:
        return is_import_path(self.backend)
