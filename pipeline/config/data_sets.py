"""Tables of a run file that describe data: files, columns, sets to train on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast

from pydantic import AfterValidator, Field, PlainValidator, model_validator

from pipeline.config.base import Positive, Section, StopStrings, setting
from pipeline.files.urls import check_url, is_url

SHAPING: Final = {
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
}
"""Settings of the distribution that are for evaluation, with the value at which they change
nothing."""
HUB_PREFIX = "hf://datasets/"


def _data_path(given: Any) -> Path | str:
    """Return a name on the hub or a URL as text, and any other path as Path."""
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
    """Refuse names that the chat template's caller fills."""
    if taken := sorted(given.keys() & _TAKEN_VARIABLES):
        raise ValueError(
            f"chat_variables sets {taken[0]}, which every prompt fills itself; expected variables of the model's own chat "
            "template, such as enable_thinking: remove it"
        )
    return given


_TAKEN_VARIABLES: Final = frozenset(
    {"messages", "add_generation_prompt", "bos_token", "eos_token", "pad_token", "unk_token"}
)
ChatVariables = Annotated[dict[str, Any], AfterValidator(_chat_variables)]
"""Variables of a chat template."""
DataPath = Annotated[Path | str, PlainValidator(_data_path)]
"""A file or a glob; or a file on the hub or in an object store, which is a text."""


class ColumnsSection(Section):
    """Columns of the files, where their names are not recognised. A dot leads into a table, as in
    reward_model.ground_truth."""

    question: str | None = setting(
        None, "Column of the prompt: a text, or a list of messages. Absent: recognised.", min_length=1
    )
    answer: str | None = setting(
        None, "Column of the answer that the verifier compares with. Absent: recognised.", min_length=1
    )
    difficulty: str | None = setting(
        None, "Column of the difficulty, a number; the larger, the harder. Absent: difficulty.", min_length=1
    )
    answer_after: str | None = setting(
        None,
        "The answer is the text after the last such mark, like #### in GSM8K. Absent: the whole text; in a row with "
        "question and answer, the text after ####.",
        min_length=1,
    )
    response: str | None = setting(
        None, "Column of data.responses with the response. Absent: response, completion or output.", min_length=1
    )
    verdict: str | None = setting(
        None,
        "Column of data.responses with the verdict: true or false, 1 or 0, right or wrong. Absent: verdict, correct, "
        "is_correct or accuracy.",
        min_length=1,
    )
    judgment: str | None = setting(
        None, "Column of data.responses that says in words what is wrong. Absent: judgment.", min_length=1
    )


class DataSetSection(Section):
    """One of several data sets to train on, written `[[data.sets]]`; they take the place of
    data.train."""

    name: str = Field(description="Its name, which begins the ids of its prompts.", min_length=1)
    train: tuple[DataPath, ...] = Field(description="Its files, as data.train.", min_length=1)
    weight: float = setting(1.0, "Its share of the prompts is weight / sum of weights. 0: not used.", ge=0.0)
    columns: ColumnsSection | None = setting(None, "Columns of this set. Absent: data.columns.")
    verifier: str | None = setting(None, "Verifier of lines that name none. Absent: data.verifier.")
    chat: Literal["auto"] | bool | None = setting(None, "As data.chat.")
    system_prompt: str | None = setting(None, "As data.system_prompt; empty: none.")
    chat_variables: ChatVariables | None = setting(None, "In place of data.chat_variables.")
    stop_strings: StopStrings | None = setting(None, "Absent: generation.stop_strings.")
    max_response_tokens: Positive | None = setting(
        None, "A response is cut at this length. Absent: generation.max_response_tokens, which is also the maximum."
    )

    @model_validator(mode="before")
    @classmethod
    def _one_distribution(cls, given: Any) -> Any:
        """Refuse a distribution of a training set's own, with the reason."""
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
