"""Claims about a real fleet whose workers go by other code of Headrace while it runs."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from protocol.headrace import PACKAGES
from tests.integration.fleet import EMULATED, ROOT, RunningFleet, fleet, kill

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SMALL = (
    *EMULATED,
    "run.num_updates=4000",
    "fleet.generator=2",
    "fleet.reward=1",
    "algorithm.groups_per_update=2",
    "algorithm.group_size=4",
    "ledger.scoring_deadline_s=3",
    "code.canary_pieces=6",
    "code.judged_updates=4",
)
SAYS = "\nimport sys\nsys.stdout.write(f'{__name__} of the new code\\n')\nsys.stdout.flush()\n"
RAISES = """

class _Raises(Generator):
    async def run(self):
        raise LookupError("of the new code")


Generator = _Raises
"""


def other(folder: Path, **ends: str) -> str:
    """A Headrace whose modules (``__`` for a dot) have other ends."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
    for module, end in ends.items():
        path = folder / (module.replace("__", "/") + ".py")
        path.write_text(path.read_text() + end)
    (folder / "ops").mkdir()
    return str(folder)


@pytest.mark.long
def test_workers_go_by_other_code_one_after_another_and_bad_code_does_not_stay(tmp_path: Path) -> None:
    speaks = dict.fromkeys(("workers__generator__generator", "workers__learner__learner"), SAYS)
    second = other(tmp_path / "second", **speaks)
    broken = other(tmp_path / "broken", workers__learner__learner="\nimport no_such_module_of_ours\n")
    changed = other(tmp_path / "changed", protocol__limits="\nA_LIMIT = 1\n")
    raises = other(tmp_path / "raises", workers__generator__generator=RAISES)
    with fleet(tmp_path, *SMALL) as run:
        folder = str(run.run_dir)
        run.wait_until(lambda: run.num_updates() >= 6, "updates")
        pids = {name: worker["pid"] for name, worker in run.workers().items()}
        assert "no_such_module_of_ours" in run.refused("update", folder, "--code", broken)
        assert "differs in protocol from the code the run was started with" in run.refused(
            "update", folder, "--code", changed
        )
        shutil.rmtree(tmp_path / "changed" / "workers")
        assert "but no workers" in run.refused("update", folder, "--code", changed)
        assert run.command("update", folder) == []
        assert {name: worker["pid"] for name, worker in run.workers().items()} == pids
        # it comes to every worker, and the run goes on
        answer = run.command("update", folder, "--code", second)
        assert answer["is_taken"] is True
        assert {one["worker"] for one in answer["taken"]} == {"supervisor", *pids}
        version = answer["change"]["sets"]["code.workers"].strip('"')
        now = {name: worker["pid"] for name, worker in run.workers().items()}
        assert not set(now.values()) & set(pids.values())
        for name in ("generator-0", "generator-1", "learner"):
            assert f"workers.{name.partition('-')[0]}" in said(run, name)
        made = run.num_updates()
        run.wait_until(lambda: run.num_updates() >= made + 6, "updates by the new code")
        # a lost worker comes back by it
        lost = kill(run, "generator-1")["pid"]
        run.wait_until(lambda: run.workers().get("generator-1", {}).get("pid", lost) != lost, "its successor")
        assert versions(run)["generator-1"] == version
        # code that fails at work goes back by itself, to the version before
        answer = run.rolled_back("update", folder, "--code", raises)
        assert "LookupError: of the new code" in answer["undone_by"]["reason"]
        assert answer["undone_by"]["sets"]["code.workers"] == f'"{version}"'
        made = run.num_updates()
        run.wait_until(lambda: run.num_updates() >= made + 4, "updates after the rollback")
        run.wait_until(lambda: {*versions(run).values()} == {version}, "the version before")
        run.command("down", folder)
        audit = run.audit()
        assert audit["balances"] and not audit["groups"]["dropped"].get("dead_letter")
    # a resume goes by the version that holds
    with fleet(tmp_path, resume=run.run_dir) as again:
        made = again.num_updates()
        again.wait_until(lambda: again.num_updates() >= made + 3, "updates of the resumed run")
        assert {*versions(again).values()} == {version}
        again.command("update", folder, "--rollback")
        again.wait_until(lambda: {*versions(again).values()} == {""}, "the installed code", 60.0)
        again.command("down", folder)


def versions(run: RunningFleet) -> dict[str, str]:
    """The version whose folder each worker's command line names; of those that run just now."""
    found: dict[str, str] = {}
    for name, worker in run.workers().items():
        with suppress(FileNotFoundError, ProcessLookupError, StopIteration):
            words = Path(f"/proc/{worker['pid']}/cmdline").read_bytes().split(b"\0")
            entry = Path(next(word for word in words if word.endswith(b"headrace.py")).decode())
            found[name] = entry.parents[1].name if entry.is_relative_to(run.run_dir / "code") else ""
    return found


def said(run: RunningFleet, worker: str) -> str:
    starter = (run.run_dir / "logs" / "starter.out").read_text()
    return (run.run_dir / "logs" / f"{worker}.out").read_text() + starter
