"""Sections that describe data: files, columns, training sets and evaluation sets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, cast

from pydantic import AfterValidator, Field, PlainValidator, model_validator

from pipeline.config.base import Positive, ReadIf, Section, StopStrings, setting
from pipeline.files.urls import check_url, is_url

SHAPING: Final = {
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
}
"""Settings that shape the sampling distribution, allowed only in evaluation, each with the value
that switches it off."""
HUB_PREFIX = "hf://datasets/"
GENERATED_PREFIX = "reasoning-gym://"
GENERATED_VERIFIER = GENERATED_PREFIX.removesuffix("://")
"""Scores the rows of generated sets. It evaluates parts of some rows and answers as Python."""


def _data_path(given: Any) -> Path | str:
    """Return a name on the hub or a URL as text, and any other path as Path."""
    if isinstance(given, str) and given.startswith(GENERATED_PREFIX):
        return given
    if isinstance(given, str) and given.startswith("hf:"):
        if given.startswith(HUB_PREFIX):
            return given
        raise ValueError(
            f"a data set on the hub is written {HUB_PREFIX}OWNER/NAME/FILE or {HUB_PREFIX}OWNER/NAME@REVISION/FILE"
        )
    if isinstance(given, str) and is_url(given):
        url, mark, digest = given.partition("#")
        return check_url(url) + mark + digest
    if not isinstance(given, str | Path) or not str(given):
        raise ValueError("expected a path")
    return Path(given)


def _chat_variables(given: dict[str, Any]) -> dict[str, Any]:
    """Refuse variables that Headrace fills in itself."""
    if taken := sorted(given.keys() & _TAKEN_VARIABLES):
        raise ValueError(
            f"chat_variables sets {taken[0]}, which Headrace fills in for every prompt; expected variables of the model's "
            "own chat template, such as enable_thinking: remove it"
        )
    return given


_TAKEN_VARIABLES: Final = frozenset(
    {"messages", "add_generation_prompt", "bos_token", "eos_token", "pad_token", "unk_token"}
)
ChatVariables = Annotated[dict[str, Any], AfterValidator(_chat_variables)]
DataPath = Annotated[Path | str, PlainValidator(_data_path)]
"""A file or a glob pattern (Path); or a file on the hub or in an object store, or a generated set (str)."""


RECORDED: Final = ReadIf(lambda run: run.data.responses, "data.responses is empty")


class ColumnsSection(Section):
    """Names of the files' columns, if they are not recognised. A dot reaches into a nested table,
    as in reward_model.ground_truth."""

    question: str | None = setting(
        None,
        "Column of the prompt: a text, or a list of messages. Default: recognised by its name.",
        min_length=1,
        also="prompt_key input_key",
    )
    answer: str | None = setting(
        None,
        "Column of the answer that the verifier compares with. Default: recognised by its name.",
        min_length=1,
        also="answer_key label_key",
    )
    difficulty: str | None = setting(
        None,
        "Column of the difficulty, a number: the larger, the harder. Default: the column `difficulty`.",
        min_length=1,
    )
    answer_after: str | None = setting(
        None,
        "The answer is the text after the last occurrence of this mark, such as #### in GSM8K. Default: the whole text, or "
        "in a row with question and answer the text after ####.",
        min_length=1,
    )
    response: str | None = setting(
        None,
        "Column of data.responses with the response. Default: response, completion or output.",
        min_length=1,
        also="response_key output_key",
        read_if=RECORDED,
    )
    verdict: str | None = setting(
        None,
        "Column of data.responses with the verdict: true or false, 1 or 0, right or wrong. Default: verdict, correct, "
        "is_correct or accuracy.",
        min_length=1,
        read_if=RECORDED,
    )
    judgment: str | None = setting(
        None,
        "Column of data.responses that says in words what is wrong. Default: judgment.",
        min_length=1,
        read_if=RECORDED,
    )


class DataSetSection(Section):
    """One of several data sets to train on, written `[[data.sets]]`; they replace data.train."""

    name: str = Field(description="Name of the set; the ids of its prompts begin with it.", min_length=1)
    train: tuple[DataPath, ...] = Field(description="Files of the set, as in data.train.", min_length=1)
    weight: float = setting(
        1.0,
        "The set's share of the prompts is weight / sum of weights. 0: not used.",
        ge=0.0,
        unit="factor",
        also="prompt_data_probs dataset_probs interleave_probs",
    )
    columns: ColumnsSection | None = setting(None, "Columns of this set. Default: data.columns.")
    verifier: str | None = setting(None, "Verifier of lines that name none. Default: data.verifier.")
    chat: Literal["auto"] | bool | None = setting(None, "As data.chat.")
    system_prompt: str | None = setting(None, "As data.system_prompt; empty: none.")
    chat_variables: ChatVariables | None = setting(None, "In place of data.chat_variables.")
    stop_strings: StopStrings | None = setting(None, "Texts that end a response. Default: generation.stop_strings.")
    max_response_tokens: Positive | None = setting(
        None, "A response is cut at this length. Default: generation.max_response_tokens, which is also the maximum."
    )

    @model_validator(mode="before")
    @classmethod
    def _one_distribution(cls, given: Any) -> Any:
        """Refuse sampling settings of a single training set, with the reason."""
        table = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
        for name in (*SHAPING, "temperature"):
            if name in table:
                raise ValueError(
                    f"data.sets {table.get('name', '')}: {name} is {table[name]!r}, but all training sets are "
                    f"sampled at generation.temperature from the whole distribution, the only one that learner and "
                    f"reference compute log-probs of; remove it: only stop_strings and max_response_tokens may "
                    f"differ between sets"
                )
        return cast("Any", given)


class EvaluationSetSection(Section):
    """One of several evaluation sets, written `[[evaluation.sets]]`. Absent settings are as in
    `[evaluation]`."""

    name: str = Field(description="Name of the set in history, status and report.", min_length=1)
    files: tuple[DataPath, ...] = Field(description="Files of the set, as in data.evaluation.", min_length=1)
    columns: ColumnsSection | None = setting(None, "Columns of this set. Default: data.columns.")
    verifier: str | None = setting(None, "Verifier of lines that name none. Default: data.verifier.")
    chat: Literal["auto"] | bool | None = setting(None, "As data.chat.")
    system_prompt: str | None = setting(None, "As data.system_prompt; empty: none.")
    chat_variables: ChatVariables | None = setting(None, "In place of data.chat_variables.")
    num_prompts: Positive | None = setting(None, "As evaluation.num_prompts.")
    samples_per_prompt: Positive | None = setting(None, "k of avg@k and pass@k.", unit="responses")
    pass_at: Positive | None = setting(None, "As evaluation.pass_at.", unit="responses")
    temperature: float | None = setting(None, "As evaluation.temperature.", ge=0.0, unit="divisor of the logits")
    top_p: float | None = setting(None, "As evaluation.top_p.", gt=0.0, le=1.0, unit="share of the probability")
    top_k: int | None = setting(None, "As evaluation.top_k.", ge=0, unit="tokens")
    min_p: float | None = setting(None, "As evaluation.min_p.", ge=0.0, le=1.0, unit="share of the largest probability")
    repetition_penalty: float | None = setting(
        None, "As evaluation.repetition_penalty.", gt=0.0, unit="factor of the logits"
    )
    presence_penalty: float | None = setting(None, "As evaluation.presence_penalty.", ge=-2.0, le=2.0, unit="logits")
    frequency_penalty: float | None = setting(None, "As evaluation.frequency_penalty.", ge=-2.0, le=2.0, unit="logits")
    stop_strings: StopStrings | None = setting(None, "As evaluation.stop_strings.")
    max_response_tokens: Positive | None = setting(None, "As evaluation.max_response_tokens.")


_SHARED: Final = tuple(
    name
    for name in EvaluationSetSection.model_fields
    if name not in ("name", "files", "columns", "verifier", "chat", "system_prompt", "chat_variables")
)
"""Settings of ``[evaluation]`` that a set may override."""


_NOT_MEANWHILE = "evaluation.every_updates is 0, so the run does not evaluate while it trains"
_MEANWHILE = ReadIf(lambda run: run.evaluation.every_updates > 0, _NOT_MEANWHILE)


class EvaluationSection(Section):
    """Periodic evaluation by the generators, queued separately from training work."""

    every_updates: int = setting(
        0,
        "Updates from one evaluation to the next. 0: only before the first and after the last update.",
        ge=0,
        live="which updates are evaluated from now on",
        also="test_freq eval_steps",
    )
    sets: tuple[EvaluationSetSection, ...] = setting((), "Further evaluation sets, each with a name.")
    num_prompts: Positive = setting(256, "Number of held-out prompts, starting with the first.")
    samples_per_prompt: Positive = setting(
        1, "k of avg@k and pass@k.", unit="responses", also="num_generations_eval eval_n_samples_per_prompt"
    )
    pass_at: Positive | None = setting(
        None, "k of pass@k, the chance that one of k responses is right. Default: samples_per_prompt.", unit="responses"
    )
    temperature: float = setting(
        0.0,
        "0 is greedy. AIME practice: 1.0 with top_p 0.7.",
        ge=0.0,
        unit="divisor of the logits",
        also="eval_temperature",
    )
    top_p: float = setting(
        1.0,
        "Sample from the smallest set of tokens whose probabilities add up to this.",
        gt=0.0,
        le=1.0,
        unit="share of the probability",
    )
    top_k: int = setting(0, "Sample from this many of the most likely tokens. 0: all.", ge=0, unit="tokens")
    min_p: float = setting(
        0.0,
        "Sample only from tokens with at least this fraction of the largest probability.",
        ge=0.0,
        le=1.0,
        unit="share of the largest probability",
    )
    repetition_penalty: float = setting(
        1.0,
        "Positive logits of tokens in prompt or response are divided by this, negative ones multiplied. 1: off. As "
        "in vLLM.",
        gt=0.0,
        unit="factor of the logits",
    )
    presence_penalty: float = setting(
        0.0,
        "Subtracted once from the logit of every token that occurs in the response.",
        ge=-2.0,
        le=2.0,
        unit="logits",
    )
    frequency_penalty: float = setting(
        0.0, "Subtracted from a token's logit for each time it occurs in the response.", ge=-2.0, le=2.0, unit="logits"
    )
    stop_strings: StopStrings | None = setting(None, "Texts that end a response. Default: generation.stop_strings.")
    max_response_tokens: Positive | None = setting(
        None, "A response is cut at this length. Default: generation.max_response_tokens, which is also the maximum."
    )
    timeout_s: float = setting(
        600.0, "After this time an evaluation counts only the responses that have arrived.", gt=0.0
    )
    main: str | None = setting(
        None,
        "Set that patience and keep_best use. Default: data.evaluation, else the first of the sets.",
        also="metric_for_best_model",
        read_if=_MEANWHILE,
    )
    patience: int = setting(
        0,
        "The run ends after this many consecutive evaluations of main without improvement. 0: never.",
        ge=0,
        unit="evaluations",
        live="how many evaluations without improvement end the run",
        also="early_stopping_patience",
        read_if=_MEANWHILE,
    )
    keep_best: bool = setting(
        False,
        "Write a checkpoint at each evaluation, and keep the one with the best result on main.",
        also="load_best_model_at_end",
        read_if=_MEANWHILE,
    )

    def of_set(self, one: EvaluationSetSection) -> EvaluationSection:
        """Return the settings of a set: its own where given, otherwise these."""
        given = {name: value for name in _SHARED if (value := getattr(one, name)) is not None}
        return self.model_copy(update=given)

    def named(self) -> Iterator[tuple[str, EvaluationSection]]:
        """Yield these settings and those of each set, with the names that messages use for them."""
        yield "evaluation", self
        for one in self.sets:
            yield f"evaluation.sets {one.name}", self.of_set(one)

    @model_validator(mode="after")
    def _sets_agree(self) -> Self:
        names = [one.name for one in self.sets]
        if len(names) > len(set(names)):
            raise ValueError(f"evaluation.sets has the names {', '.join(names)}; give each set a different name")
        if self.main is not None and self.main not in names:
            raise ValueError(
                f"evaluation.main is {self.main!r}, but evaluation.sets has {', '.join(names) or 'none'}; name one of them, "
                "or leave it out"
            )
        for what, one in self.named():
            if one.pass_at is not None and one.pass_at > one.samples_per_prompt:
                raise ValueError(
                    f"{what}: pass_at is {one.pass_at}, above samples_per_prompt {one.samples_per_prompt}; raise "
                    "samples_per_prompt, or lower pass_at"
                )
        return self
