"""Tables of a run file that describe data: which columns are prompt and answer."""

from __future__ import annotations

from pipeline.config.base import Section, setting


class ColumnsSection(Section):
    """Columns of the files, where their names are not recognised. A dot leads into a table, as in
    reward_model.ground_truth."""

    question: str | None = setting(
        None, "Column of the prompt: a text, or a list of messages. Absent: recognised.", min_length=1
    )
    answer: str | None = setting(
        None, "Column of the answer that the verifier compares with. Absent: recognised.", min_length=1
    )
    answer_after: str | None = setting(
        None,
        "The answer is the text behind the last such mark, as #### in GSM8K. Absent: the whole text; in a row of "
        "question and answer, the text behind ####.",
        min_length=1,
    )
