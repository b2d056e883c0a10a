"""A run's folder with checkpoints, and a mirror in a folder beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.config.load import write_resolved
from pipeline.files.object_store import ObjectStore
from pipeline.training.checkpoints import CHECKPOINTS, VALUE_CHECKPOINTS, CheckpointFolder
from pipeline.training.mirror.copying import Copying, CopyListener
from pipeline.training.mirror.layout import CopyManifest
from tests.pipeline.op_config import op_config


@dataclass
class MirroredRun:
    """A run and its mirror."""

    folder: Path
    run_dir: Path
    url: str
    moved: list[int] = field(default_factory=list)

    @property
    def store(self) -> ObjectStore:
        return ObjectStore(self.url)

    @property
    def bucket(self) -> Path:
        return Path(self.url.removeprefix("file://"))

    def checkpoint(self, version: int, text: str = "", *, kind: str = CHECKPOINTS, segment: int = 0) -> Path:
        """Write a checkpoint, as its worker would; two are kept."""

        def save(place: Path) -> None:
            (place / "model").mkdir()
            (place / "model" / "weights").write_text((text or str(version)) * 1000)
            (place / "model" / "tokenizer").write_text("the same in all")

        folder = CheckpointFolder(self.run_dir / kind, owner="learner#1", keep=2)
        folder.take_over()
        try:
            return folder.write(version, save, {"num_updates": version, "update_log_segment": segment})
        finally:
            folder.close()

    def copy(self, *, owner: str = "a", takes_over: bool = False, is_last: bool = False) -> CopyManifest | None:
        """Copy the run once, as its own owner unless one is given."""
        progress = CopyListener(lambda *_: None, self.moved.append, lambda: None)
        copying = Copying(self.run_dir, self.store, owner, progress)
        return copying.copy(run="op", keep=2, takes_over=takes_over or owner == "a", is_last=is_last)

    def break_content(self, digest: str, change: Callable[[bytes], bytes]) -> None:
        """Damage a content of the mirror."""
        path = self.bucket / "files" / digest.rpartition(":")[2]
        path.write_bytes(change(path.read_bytes()))


def mirrored_run(folder: Path, *overrides: str) -> MirroredRun:
    config = op_config(folder, f"checkpoint.mirror=file://{folder}/bucket", *overrides)
    run_dir = config.run_dir
    for name in ("logs", "keys", "updates", "tallies", "ledger/appendonlydir"):
        (run_dir / name).mkdir(parents=True)
    write_resolved(config, run_dir)
    (run_dir / "history.jsonl").write_text('{"kind": "update"}\n')
    (run_dir / "keys" / "host.secret").write_text("curve-of-a-test")
    (run_dir / "logs" / "learner.jsonl").write_text("log-of-a-test")
    (run_dir / "ledger" / "server.conf").write_text("requirepass password-of-a-test")
    (run_dir / "ledger" / "appendonlydir" / "appendonly.aof.1.base.rdb").write_text("base")
    (run_dir / "ledger" / "appendonlydir" / "appendonly.aof.manifest").write_text("file ...")
    (run_dir / "tallies" / "generator-0.1").write_text("tally")
    for number in (1, 2, 3):
        (run_dir / "updates" / f"00000{number}.epoch-1.log").write_text(f"segment {number}")
    return MirroredRun(folder, run_dir, f"file://{folder}/bucket/op")


__all__ = ["CHECKPOINTS", "VALUE_CHECKPOINTS", "MirroredRun", "mirrored_run"]
