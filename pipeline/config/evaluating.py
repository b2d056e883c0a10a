"""Tables of a run file for evaluation: `[evaluation]`, and sets beside that of data.evaluation."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from pipeline.config.base import Positive, Section, setting
from pipeline.config.data_sets import ColumnsSection, DataPath


class EvaluationSetSection(Section):
    """One of several evaluation sets, written `[[evaluation.sets]]`. Absent settings are as in
    `[evaluation]`."""

    name: str = Field(description="Its name, in history, status and report.", min_length=1)
    files: tuple[DataPath, ...] = Field(description="Its files, as data.evaluation.", min_length=1)
    columns: ColumnsSection | None = setting(None, "Its columns. Absent: data.columns.")
    verifier: str | None = setting(None, "Verifier of its lines that name none. Absent: data.verifier.")
    num_prompts: Positive | None = setting(None, "As evaluation.num_prompts.")
    samples_per_prompt: Positive | None = setting(None, "k of avg@k and pass@k.")
    pass_at: Positive | None = setting(None, "As evaluation.pass_at.")
    temperature: float | None = setting(None, "As evaluation.temperature.", ge=0.0)
    top_p: float | None = setting(None, "As evaluation.top_p.", gt=0.0, le=1.0)


class EvaluationSection(Section):
    """Periodic evaluation, by the generators, in a lane of its own."""

    every_updates: int = setting(0, "0: only before the first and after the last update.", ge=0)
    sets: tuple[EvaluationSetSection, ...] = setting((), "Further evaluation sets, each with a name.")
    num_prompts: Positive = setting(256, "Number of held-out prompts, counted from the first.")
    samples_per_prompt: Positive = setting(1, "k of avg@k and pass@k.")
    pass_at: Positive | None = setting(
        None, "k of pass@k, the chance that one of k responses is right. Absent: samples_per_prompt."
    )
    temperature: float = setting(0.0, "0 is greedy. AIME practice: 1.0 with top_p 0.7.", ge=0.0)
    top_p: float = setting(1.0, "May be below 1: evaluation trains nothing.", gt=0.0, le=1.0)
    timeout_s: float = setting(600.0, "After this time an evaluation counts the responses that are there.", gt=0.0)
    main: str | None = setting(
        None, "Set that patience and keep_best go by. Absent: data.evaluation, else the first of the sets."
    )
    patience: int = setting(
        0, "The run ends after this many evaluations of main in a row that are no better. 0: never.", ge=0
    )
    keep_best: bool = setting(False, "Write a checkpoint at each evaluation, and keep that of the best one of main.")

    def of_set(self, one: EvaluationSetSection) -> EvaluationSection:
        """Return the settings of a set: its own, else these."""
        names = ("num_prompts", "samples_per_prompt", "pass_at", "temperature", "top_p")
        given = {name: value for name in names if (value := getattr(one, name)) is not None}
        return self.model_copy(update=given)

    @model_validator(mode="after")
    def _sets_agree(self) -> Self:
        names = [one.name for one in self.sets]
        if len(names) > len(set(names)):
            raise ValueError(f"evaluation.sets has the names {', '.join(names)}; give each set a name of its own")
        if self.main is not None and self.main not in names:
            raise ValueError(
                f"evaluation.main is {self.main!r}, but evaluation.sets has {', '.join(names) or 'none'}; name one of them, "
                "or leave it out"
            )
        for what, one in (
            ("evaluation", self),
            *((f"evaluation.sets {one.name}", self.of_set(one)) for one in self.sets),
        ):
            if one.pass_at is not None and one.pass_at > one.samples_per_prompt:
                raise ValueError(
                    f"{what}: pass_at is {one.pass_at}, above samples_per_prompt {one.samples_per_prompt}; raise "
                    "samples_per_prompt, or lower pass_at"
                )
        return self
