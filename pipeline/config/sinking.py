"""The table of a run file for metrics: where they are written besides the history."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator

from pipeline.config.base import Section, setting

_PROJECT: Final = re.compile(r"([A-Za-z0-9_.-]+/)?[A-Za-z0-9_.-]{1,128}")
_SQLITE: Final = "sqlite:///"


def _project(text: str) -> str:
    if _PROJECT.fullmatch(text) is None:
        raise ValueError(
            f"{text!r} is not a Weights & Biases project; expected PROJECT or ENTITY/PROJECT, without a URL"
        )
    return text


def _tracking(text: str) -> str:
    """Return a tracking URI, its file with a whole path."""
    if text.startswith(_SQLITE) and len(text) > len(_SQLITE):
        return f"{_SQLITE}{Path(text.removeprefix(_SQLITE)).expanduser().absolute()}"
    try:
        parts = urlsplit(text)
        is_server = parts.scheme in ("http", "https") and bool(parts.hostname)
        has_secret = bool(parts.username or parts.password or parts.query)
    except ValueError:
        is_server = has_secret = False
    if is_server and has_secret:
        raise ValueError(
            "a tracking URI has no name, password or query; remove them, and give MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, in the environment"
        )
    if not is_server:
        shown = f"{text.partition('://')[0]}://" if "://" in text else repr(text)
        raise ValueError(
            f"{shown} is not a tracking URI that Headrace can write to; expected http://HOST:PORT, https://HOST or sqlite:///FILE"
        )
    return text.rstrip("/")


class SinksSection(Section):
    """Where metrics are written besides history.jsonl. A sink that is away never stops a run; the
    log names it once, and rows wait in the history."""

    tensorboard: bool = setting(True, "Write TensorBoard's event files to the folder tensorboard of the run.")
    wandb: Annotated[str, AfterValidator(_project)] | None = setting(
        None,
        "PROJECT or ENTITY/PROJECT of Weights & Biases, by `pip install 'headrace[wandb]'`. The key comes from "
        "`wandb login` or WANDB_API_KEY, never from here. Absent: none.",
    )
    wandb_mode: Literal["online", "offline"] | None = setting(
        None,
        "offline: keep it in the folder sinks/wandb of the run, for `wandb sync`. Absent: WANDB_MODE, else online.",
    )
    mlflow: Annotated[str, AfterValidator(_tracking)] | None = setting(
        None,
        "MLflow's tracking URI: http://HOST:PORT, https://HOST or sqlite:///FILE, by `pip install 'headrace[mlflow]'`. "
        "Credentials come only from the environment, such as MLFLOW_TRACKING_TOKEN. Absent: none.",
    )
    mlflow_experiment: str = setting("headrace", "Experiment of the run; created if missing.", min_length=1)
    finish_s: float = setting(30.0, "How long the run waits at its end for a sink to accept the last points.", gt=0.0)
