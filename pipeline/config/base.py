"""The base class of configuration sections, and constrained types for settings."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from pipeline.files.urls import check_url


def _stop_string(text: str) -> str:
    if not text or "\ufffd" in text:
        raise ValueError(
            f"a stop string is {text!r}; expected non-empty, valid Unicode text, since a response must be able to contain it"
        )
    return text


Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
StopStrings = tuple[Annotated[str, AfterValidator(_stop_string)], ...]
StoreUrl = Annotated[str, AfterValidator(check_url)]
"""URL of a folder in an object store."""
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Recompute = Literal["auto"] | bool | Positive
"""Number of layers; true: all."""


class Section(BaseModel):
    """Base of all sections: frozen, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def setting(default: Any, description: str, *, unit: str = "", live: str = "", also: str = "", **limits: Any) -> Any:
    """Declare a setting with a default.

    ``unit``, in words, where the name does not end in it. ``live``: what changes when the learner
    takes another value between two updates; empty for a setting that may not change in a running
    run. ``also``: its names in TRL, verl, OpenRLHF and prime-rl, separated by spaces, where they
    differ. ``limits`` are passed to ``pydantic.Field``."""
    facts = {"unit": unit, "live": live, "also": also}
    return Field(default, description=description, json_schema_extra=cast("Any", facts), **limits)


def required(description: str, *, also: str = "") -> Any:
    """Declare a setting that must be given."""
    return Field(description=description, json_schema_extra={"also": also})


def fact(info: FieldInfo, name: str) -> str:
    """Return what a setting's declaration says of its ``unit``, ``live`` or ``also``; empty if nothing."""
    facts = cast("Any", info.json_schema_extra)
    return str(cast("dict[str, Any]", facts).get(name, "")) if isinstance(facts, dict) else ""
