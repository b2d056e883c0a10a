"""Progress of fetches from the hub and of uploads: bytes done and time left, in the form of all
other long work.

For fetches the package ``huggingface_hub`` takes a class of bars. For uploads it takes none, so its
own class is changed meanwhile. Both count for a bar of ``pipeline.process.progress_bar`` and draw
nothing themselves."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from pipeline.process.progress_bar import ProgressBar, progress

_MB = 1e6


@contextmanager
def fetching(what: str) -> Generator[type[Any]]:
    """Show a fetch's progress; yield the class of bars to pass to the package."""
    with progress(f"fetching {what}", unit="MB") as bar:
        yield _counting(bar)


class UploadCourse:
    """How far an upload is that sends its files one after another."""

    def __init__(self, bar: ProgressBar) -> None:
        self._bar = bar
        self._before = self._here = self._size = 0.0

    @contextmanager
    def file(self, name: str, num_bytes: int) -> Generator[None]:
        """Count one file, which the block uploads."""
        self._here, self._size = 0.0, float(num_bytes)
        self._bar.detail(name)
        yield
        self._before += num_bytes
        self._bar.reach(self._before / _MB)

    def reach(self, num_bytes: float) -> None:
        """So many bytes of the file are done. One file has several of the package's bars; the
        furthest counts."""
        self._here = max(self._here, min(num_bytes, self._size))
        self._bar.reach((self._before + self._here) / _MB)


@contextmanager
def uploading(what: str, num_bytes: int) -> Generator[UploadCourse]:
    """Show the progress of an upload in the block, and have the package's bars draw nothing."""
    # Deferred: most commands upload nothing.
    from huggingface_hub.utils import tqdm

    with progress(f"uploading {what}", total=num_bytes / _MB, unit="MB") as bar:
        shown = UploadCourse(bar)
        begin: Callable[..., None] = tqdm.__init__

        def quiet(one: Any, *arguments: Any, **options: Any) -> None:
            begin(one, *arguments, **(options | {"disable": True}))

        def update(one: Any, n: float | None = 1) -> None:
            one.n += n or 0
            shown.reach(one.n)

        # Any: the class is changed, and not an instance.
        hub_bar: Any = tqdm
        hub_bar.__init__, hub_bar.update = quiet, update
        try:
            yield shown
        finally:
            hub_bar.__init__ = begin
            # It was inherited.
            del hub_bar.update


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
