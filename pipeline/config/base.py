"""What all sections of a configuration are made of.

*Consumes* and *waits for* nothing. Unknown keys are refused and nothing changes after it was read.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """Base of all sections: frozen, nothing unknown."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
