"""The base class of configuration sections, and constrained types for settings."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

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


class Section(BaseModel):
    """Base of all sections: frozen, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def setting(default: Any, description: str, **limits: Any) -> Any:
    """Declare a setting with a default. ``limits`` are passed to ``pydantic.Field``."""
    return Field(default, description=description, **limits)
