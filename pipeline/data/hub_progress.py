"""Progress of fetches from the hub: bytes done and time left, in the form of all other long work.

The package ``huggingface_hub`` takes a class of bars. Ours draws nothing: it counts for a bar of
``pipeline.process.progress_bar``, which fills no log and goes when the fetch ends."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from pipeline.process.progress_bar import ProgressBar, progress

_MB = 1e6


@contextmanager
def fetching(what: str) -> Generator[type[Any]]:
    """Show a fetch's progress; yield the class of bars to pass to the package."""
    with progress(f"fetching {what}", unit="MB") as bar:
        yield _counting(bar)


def _counting(bar: ProgressBar) -> type[Any]:
    # Deferred: the package brings it, and most commands fetch nothing.
    from tqdm.auto import tqdm

    class HubBar(tqdm):  # pyright: ignore[reportMissingTypeArgument]
        """One of the package's bars. Those of bytes count, and the furthest is shown."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            options.pop("name", None)
            self._counts_bytes = options.get("unit") == "B"
            self._done = float(options.get("initial") or 0.0)
            super().__init__(*arguments, **(options | {"disable": True}))

        def update(self, n: float | None = 1) -> None:
            self._done += n or 0.0
            if self._counts_bytes and self.total:
                bar.reach(self._done / _MB, self.total / _MB)

    return HubBar
