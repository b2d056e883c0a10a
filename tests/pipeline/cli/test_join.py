"""Claims about the words of ``headrace fleet join``, and its refusals before a server is reached."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from pipeline.cli import headrace
from pipeline.cli.join import check_host
from pipeline.ledger.token import Token, write_token
from pipeline.preflight.vllm import installed_builds
from pipeline.supervisor.joining.joined_folder import claimed_folder
from pipeline.supervisor.joining.joined_supervisor import JoinOutcome
from protocol.errors import ConfigError
from protocol.ids import Role
from tests.pipeline.op_config import op_config
from tests.small_disk import small_disk

URL = "redis://127.0.0.1:1/0"


def refusal(*words: str, **environment: str) -> str:
    """Return the sentence by which the command refuses."""
    done = CliRunner().invoke(headrace, ["fleet", "join", *words], env={"REDIS_URL": None, **environment})
    assert done.exit_code != 0
    return done.output if isinstance(done.exception, SystemExit) else str(done.exception)


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "t.token"
    write_token(path, Token(run="demo", role=Role.GENERATOR, id="generator-1", secret="s" * 40))
    return path


def test_a_password_in_the_arguments_is_refused_and_not_repeated(token: Path) -> None:
    words = refusal("redis://:hunter2@host/0", "--token", str(token))
    assert "every user of this host can see in the process list" in words and "hunter2" not in words


def test_a_token_for_another_role_or_run_is_refused_with_both(token: Path) -> None:
    for words in (("--role", "reward"), ("--run", "other")):
        told = refusal(URL, "--token", str(token), *words)
        assert "is for generator workers of the run demo" in told and words[1] in told


def test_a_join_without_a_ledger_a_run_or_a_role_names_what_to_give() -> None:
    assert "no ledger: give its URL" in refusal("--run", "demo", "--role", "reward")
    assert "Give --token FILE, or --run NAME and --role ROLE" in refusal(URL)
    assert "cannot name 2 reward workers" in refusal(
        URL, "--run", "r", "--role", "reward", "--count", "2", "--name", "reward-1"
    )
    for other in ("learner-0", "generator-reward-1", "reward"):
        refused = refusal(URL, "--run", "r", "--role", "reward", "--name", other)
        assert f"'{other}' cannot name 1 reward workers; expected --count 1 and a name like reward-2" in refused


@pytest.mark.skipif(bool(installed_builds()), reason="vLLM is installed here")
def test_a_host_without_vllm_is_refused_with_the_install(tmp_path: Path) -> None:
    config = op_config(tmp_path, "generation.engine=vllm")
    with pytest.raises(ConfigError, match=r"vLLM is not installed here; .* `pip install headrace\[vllm\]`"):
        check_host(config, Role.GENERATOR)
    # It judges without an engine.
    check_host(config, Role.REWARD)


def test_two_joins_on_one_host_have_folders_and_workers_of_their_own(tmp_path: Path) -> None:
    with (
        claimed_folder(tmp_path, "demo", Role.GENERATOR) as one,
        claimed_folder(tmp_path, "demo", Role.GENERATOR) as other,
    ):
        assert one.path != other.path
        assert one.worker_name(Role.GENERATOR, 0) != other.worker_name(Role.GENERATOR, 0)
        assert not one.is_own(other.worker_name(Role.GENERATOR, 0))
    with claimed_folder(tmp_path, "demo", Role.GENERATOR) as again:
        assert again == one, "a later join adopts what an earlier one left"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises((ConfigError, click.ClickException), match="cannot be created"):
        claimed_folder(tmp_path / "file", "demo", Role.GENERATOR).__enter__()


def test_a_token_that_finds_no_room_on_this_host_is_told_with_the_folder(tmp_path: Path) -> None:
    token = tmp_path / "t.token"
    write_token(token, Token(run="demo", role=Role.GENERATOR, id="generator-1", secret="s" * 40, ca="an authority"))
    room = "cannot be written to: No space left on device; make room"
    written = "ledger.token cannot be written: No space left on device"
    with small_disk(tmp_path / "small") as disk:
        # For lock, tag, copy of the token, its authority.
        for num_pages, words in enumerate((room, room, written, room)):
            disk.leave(num_pages)
            base = disk.folder / str(num_pages)
            told = refusal("rediss://127.0.0.1:1/0", "--token", str(token), "--dir", str(base))
            assert f"{base}/generator-" in told and words in told


def test_a_host_that_stays_says_so_in_one_line_and_ends_as_without(
    redis_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def joined(*_: object, **__: object) -> JoinOutcome:
        return JoinOutcome(0, "the run is stopping: by the test", may_resume=True)

    monkeypatch.setattr("pipeline.supervisor.joining.join.join", joined)
    words = ["fleet", "join", redis_server, "--run", "never-begun", "--role", "reward", "--dir", str(tmp_path)]
    for stay, lines in ((), 0), (("--stay", "0.1"), 1):
        done = CliRunner().invoke(headrace, [*words, *stay], standalone_mode=False)
        assert done.return_value == 0 and "the run is stopping: by the test\n" in done.stdout
        assert done.stderr.count("by the test; this host waits up to 0.1 s for `headrace up --resume`") == lines
