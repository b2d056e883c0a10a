"""Tables of a run file that describe data: files, columns, sets to train on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from pipeline.config.base import Section, setting

HUB_PREFIX = "hf://datasets/"


def _data_path(given: Any) -> Path | str:
    """Return a name on the hub as text, and any other path as Path."""
    if isinstance(given, str) and given.startswith("hf:"):
        if given.startswith(HUB_PREFIX):
            return given
        raise ValueError(
            f"a data set on the hub is written {HUB_PREFIX}OWNER/NAME/FILE or {HUB_PREFIX}OWNER/NAME@REVISION/FILE"
        )
    if not isinstance(given, str | Path) or not str(given):
        raise ValueError("expected a path")
    return Path(given)


DataPath = Annotated[Path | str, PlainValidator(_data_path)]
"""A file, a glob, or a file on the hub, which is a text."""


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
        "The answer is the text behind the last such mark, as #### in GSM8K. Absent: the whole text; in a row of "
        "question and answer, the text behind ####.",
        min_length=1,
    )


class DataSetSection(Section):
    """One of several data sets to train on, written `[[data.sets]]`; they take the place of
    data.train."""

    name: str = Field(description="Its name, which begins the ids of its prompts.", min_length=1)
    train: tuple[DataPath, ...] = Field(description="Its files, as data.train.", min_length=1)
    weight: float = setting(1.0, "Its share of the prompts is weight / sum of weights. 0: not used.", ge=0.0)
    columns: ColumnsSection | None = setting(None, "Its columns. Absent: data.columns.")
    verifier: str | None = setting(None, "Verifier of its lines that name none. Absent: data.verifier.")
