"""Claims about `headrace up --on PLACE` before anything is started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeline.cli import headrace
from pipeline.ledger.address import LedgerAddress, write_address
from pipeline.supervisor.launchers.build import join_command
from protocol.errors import ConfigError, HeadraceError
from tests.pipeline.op_config import op_config, write_config

PASSWORD = "the-ledgers-password"
REACHABLE = ("--set", f"ledger.url=rediss://:{PASSWORD}@ledger.example:6379/0", "--set", "wire.transport=tcp")


def up(tmp_path: Path, *words: str) -> Result:
    return CliRunner().invoke(headrace, ["up", str(write_config(tmp_path)), *words])


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ("slurm", "exec srun --ntasks=1 headrace fleet join rediss://ledger.example:6379/0 --token "),
        ("kubernetes", "kind: StatefulSet"),
        ("local", "# processes of this host: 1 learner, 2 generator"),
        ("ray", "generator-1: CPU 1\n"),
    ],
)
def test_a_dry_run_prints_what_would_be_submitted_and_starts_nothing(tmp_path: Path, place: str, shown: str) -> None:
    result = up(tmp_path, "--on", place, "--dry-run", "--set", "fleet.generator=2", *REACHABLE)
    assert result.exit_code == 0, result.output
    assert shown in result.output
    assert PASSWORD not in result.output
    assert not (tmp_path / "runs").exists()


def test_the_ledger_of_the_environment_reaches_jobs_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", f"rediss://:{PASSWORD}@ledger.example:6379/0")
    result = up(tmp_path, "--on", "slurm", "--dry-run", "--set", "wire.transport=tcp")
    assert "headrace fleet join rediss://ledger.example:6379/0 --token " in result.output
    assert PASSWORD not in result.output


def test_a_later_command_knows_the_ledger_of_the_run_without_the_environment(tmp_path: Path) -> None:
    config = op_config(tmp_path, "wire.transport=tcp", "launch.on=slurm")
    write_address(tmp_path, LedgerAddress(url=f"rediss://:{PASSWORD}@ledger.example:6379/0"))
    assert join_command(config, tmp_path).url == "rediss://ledger.example:6379/0"
    write_address(tmp_path, LedgerAddress(url="unix:///run/ledger.sock", is_embedded=True))
    with pytest.raises(ConfigError, match="a server of this run, which no other host reaches"):
        join_command(config, tmp_path)


def test_a_dry_run_has_a_job_for_each_launched_worker(tmp_path: Path) -> None:
    result = up(tmp_path, "--on", "slurm", "--dry-run", "--set", "fleet.generator=3", *REACHABLE)
    names = [line.partition("=")[2] for line in result.output.splitlines() if "--job-name" in line]
    workers = ("generator-0", "generator-1", "generator-2", "reward-0")
    assert names == [f"headrace.op.{worker}" for worker in workers]


def test_a_jobs_folder_is_in_the_home_that_its_default_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    result = up(tmp_path, "--on", "slurm", "--dry-run", *REACHABLE)
    folder = tmp_path / "home" / ".headrace" / "slurm" / "op"
    assert f"#SBATCH --output={folder}/generator-0.out" in result.output.splitlines()
    assert "~" not in result.output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--on", "pbs"), "launch.on"),
        (
            ("--on", "slurm", "--set", "wire.transport=tcp"),
            "launch.on is slurm, but the ledger would be a server of this run",
        ),
        (("--on", "slurm", "--set", "ledger.url=rediss://h:1/0"), "wire.transport ipc reaches no other host"),
        (
            ("--on", "slurm", *REACHABLE, "--set", "launch.ledger_url=rediss://:pw@h:1/0"),
            "would be visible in process arguments",
        ),
        (("--on", "slurm", *REACHABLE, "--set", 'launch.roles=["learner"]'), "cannot be launched"),
    ],
)
def test_what_no_place_could_run_is_refused(tmp_path: Path, words: tuple[str, ...], told: str) -> None:
    result = up(tmp_path, *words, "--dry-run")
    assert isinstance(result.exception, HeadraceError)
    assert told in str(result.exception)


def test_an_address_of_a_ray_cluster_goes_with_on_ray_alone(tmp_path: Path) -> None:
    shown = up(tmp_path, "--on", "ray", "--address", "head.example:6379", "--dry-run", *REACHABLE)
    assert "of the Ray cluster head.example:6379" in shown.output
    refused = up(tmp_path, "--on", "ssh", "--address", "head.example:6379", "--dry-run", *REACHABLE)
    assert refused.exit_code == 2 and "give --on ray too" in refused.output


def test_without_sbatch_nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    result = up(
        tmp_path, "--on", "slurm", "--plain", "--set", "ledger.url=rediss://h:1/0", "--set", "wire.transport=tcp"
    )
    assert isinstance(result.exception, HeadraceError)
    assert "there is no sbatch on PATH" in str(result.exception)
    assert not (tmp_path / "runs").exists()
