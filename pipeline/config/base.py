"""The base class of configuration sections, and constrained types for settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
NumberType = Literal["float32", "bfloat16"]
ComputeType = Literal["auto"] | NumberType


class Section(BaseModel):
    """Base of all sections: frozen, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class ReadIf:
    """When a run reads a setting or a section."""

    holds: Callable[[Any], Any]
    """Whether a ``RunConfig`` reads it."""
    otherwise: str
    """Why it does not; may contain ``{algorithm}``."""


def setting(
    default: Any,
    description: str,
    *,
    unit: str = "",
    live: str = "",
    also: str = "",
    read_if: ReadIf | tuple[ReadIf, ...] = (),
    **limits: Any,
) -> Any:
    """Declare a setting with a default.

    ``unit``, in words, where the name does not end in it. ``live``: what changes when the learner
    takes another value between two updates; empty for a setting that may not change in a running
    run. ``also``: its names in TRL, verl, OpenRLHF and prime-rl, separated by spaces, where they
    differ. ``read_if``: what must hold so that a run reads it, if not every run does. ``limits`` are
    passed to ``pydantic.Field``."""
    facts = {"unit": unit, "live": live, "also": also, "read_if": read_if}
    return Field(default, description=description, json_schema_extra=cast("Any", facts), **limits)


def required(description: str, *, also: str = "") -> Any:
    """Declare a setting that must be given."""
    return Field(description=description, json_schema_extra={"also": also})


def section(default: Section, *, read_if: ReadIf | tuple[ReadIf, ...]) -> Any:
    """Declare a section that not every run reads."""
    return Field(default, json_schema_extra=cast("Any", {"read_if": read_if}))


def fact(info: FieldInfo, name: str) -> str:
    """Return what a setting's declaration says of its ``unit``, ``live`` or ``also``; empty if nothing."""
    return str(_facts(info).get(name, ""))


def conditions(info: FieldInfo) -> tuple[ReadIf, ...]:
    """Return what must hold so that a run reads a setting or section."""
    found: ReadIf | tuple[ReadIf, ...] = _facts(info).get("read_if", ())
    return (found,) if isinstance(found, ReadIf) else found


def _facts(info: FieldInfo) -> dict[str, Any]:
    facts = cast("Any", info.json_schema_extra)
    return cast("dict[str, Any]", facts) if isinstance(facts, dict) else {}
