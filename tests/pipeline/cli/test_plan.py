"""``headrace plan``: what it says, files that ``headrace up`` reads as they are, and a changed model that is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from pipeline.cli import main
from pipeline.config.gpus import check_gpus
from pipeline.config.load import load_config, write_resolved
from pipeline.observability.fleet_history import FleetRow, RoleTime, fleet_history
from pipeline.observability.history import HISTORY_NAME, run_history
from pipeline.plan.profile import profile_run
from pipeline.preflight.checks import preflight
from pipeline.process.work import ServiceSums
from pipeline.supervisor.fleet_size import desired_counts
from protocol.errors import ConfigError
from tests.pipeline.plan import test_profile

MODEL = Path("ops/demo/tiny_model")
SEVEN = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064,
}  # fmt: skip


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *words])
    told = capsys.readouterr()
    assert ended.value.code == 0, told.err
    return told.out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *words])
    assert ended.value.code == 2
    return capsys.readouterr().err


def seven(folder: Path, **changes: Any) -> str:
    (folder / "seven").mkdir(exist_ok=True)
    (folder / "seven" / "config.json").write_text(json.dumps(SEVEN | changes))
    return str(folder / "seven")


def a_run(folder: Path) -> Path:
    """Write a run file whose model is a copy of the demo's."""
    shutil.copytree(MODEL, folder / "model", dirs_exist_ok=True)
    (folder / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "verifier": "arithmetic"}\n' * 4)
    settings = {
        "run": {"name": "mine", "dir": str(folder / "runs"), "num_updates": 2},
        "model": {"path": str(folder / "model")},
        "data": {"train": [str(folder / "train.jsonl")], "max_prompt_tokens": 16},
        "algorithm": {"groups_per_update": 2, "group_size": 2},
        "generation": {"max_response_tokens": 16, "window_tokens": 16},
    }
    (folder / "mine.toml").write_text(tomli_w.dumps(settings))
    return folder / "mine.toml"


def test_it_says_what_to_start_how_fast_what_binds_and_what_comes_next(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    told = run(capsys, seven(tmp_path), "--devices", "8xH200")
    for words in (
        "an update every",
        "trained response tokens a second",
        "limited by",
        "staleness   at most",
        "EUR an update",
    ):
        assert words in told
    assert "of 141" in told and "no plan is 1 % faster" in told and "next" in told


def test_its_json_has_the_same_numbers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    best = json.loads(run(capsys, seven(tmp_path), "--devices", "8xH200", "--json"))["best"]
    assert best["tokens_per_s"] * best["update_s"] == pytest.approx(512 * 1024)
    assert best["eur_per_update"] * 3600 == pytest.approx(best["eur_per_hour"] * best["update_s"])
    assert best["run"]["learner"]["ranks"] >= 1 and best["needs"] == []


def test_it_says_what_the_learners_ranks_send(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = (seven(tmp_path), "--devices", "8xH200")
    best = json.loads(run(capsys, *words, "--json"))["best"]
    assert best["run"]["learner"]["backend"] == "fsdp2" and "a rank of the learner" in run(capsys, *words)
    gathered, reduced = best["moved"]["learner"]
    assert (gathered["by"], gathered["what"]) == ("all-gather", "weights")
    assert (reduced["by"], reduced["what"]) == ("reduce-scatter", "gradients")
    # weights for the forward and for the backward pass
    assert gathered["bytes"] == pytest.approx(2 * reduced["bytes"])
    assert gathered["ranks"] == reduced["ranks"] == best["run"]["learner"]["ranks"]


def test_up_takes_what_it_writes_for_cores(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    told = run(capsys, str(a_run(tmp_path)), "--devices", "2xCPU", "--write", str(tmp_path / "plan"))
    assert f"headrace up {tmp_path}/plan/run.toml --fleet {tmp_path}/plan/fleet.toml" in told
    config = load_config([tmp_path / "plan/run.toml", tmp_path / "plan/fleet.toml"])
    assert config.fleet.generator in (1, 2) and config.fleet.planned_update_s and config.run.num_updates == 2
    assert preflight(config).findings


def test_up_takes_what_it_writes_for_gpus(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = (
        seven(tmp_path),
        "--devices",
        "8xH200",
        "--data",
        "prompts.jsonl",
        "--write",
        str(tmp_path / "plan"),
    )
    run(capsys, *words)
    files = [tmp_path / "plan/run.toml", tmp_path / "plan/fleet.toml"]
    config = load_config(files)
    assert config.learner.ranks > 1 and config.learner.backend in ("fsdp2", "deepspeed", "pipeline")
    assert config.generation.engine == "vllm" and config.model.dtype == "bfloat16"
    gpus, each = config.fleet.gpus, config.generation.vllm.tensor_parallel_size
    assert len(gpus.learner) == config.learner.ranks and len(gpus.generator) == config.fleet.generator * each
    assert sorted({*gpus.learner, *gpus.generator}) == list(range(8)) and config.wire.transport == "ipc"
    check_gpus(config, desired_counts(config))


def test_generators_on_other_hosts_join_by_hand_each_on_gpus_of_one_host(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("--devices", "24xH100", "--data", "prompts.jsonl", "--write", str(tmp_path / "plan"))
    run(capsys, seven(tmp_path), *words)
    files = [tmp_path / "plan/run.toml", tmp_path / "plan/fleet.toml"]
    config = load_config(files)
    lines = [line for line in files[1].read_text().splitlines() if "CUDA_VISIBLE_DEVICES" in line]
    assert lines and config.fleet.generator == 0 and config.wire.transport == "tcp" and not config.fleet.gpus.learner
    gpus = [(line[-1], gpu) for line in lines for gpu in line.partition("=")[2].split()[0].split(",")]
    assert len(set(gpus)) == len(gpus) == len(lines) * config.generation.vllm.tensor_parallel_size
    assert {gpu for _, gpu in gpus} <= set("01234567") and {host for host, _ in gpus} <= set("123")


def a_finished_run(folder: Path, *, slower: float = 1.0) -> str:
    """Write the records of a run of one generator."""
    config = load_config([a_run(folder)], ["generation.max_response_tokens=64", "algorithm.groups_per_update=64"])
    run_dir = folder / "runs" / "mine"
    run_dir.mkdir(parents=True)
    write_resolved(config, run_dir)
    updates, rows = test_profile.a_run()
    run_history(run_dir / HISTORY_NAME).append(*updates)
    for row in rows:
        done = row.roles["generator"].service["sampling"]
        took = ServiceSums(done.pieces, slower * done.seconds, done.size)
        one = RoleTime(1.0, {"compute": 1.0}, service={"sampling": took})
        fleet_history(run_dir).append(FleetRow(row.at_s, row.span_s, {**row.roles, "generator": one}))
    return str(run_dir)


def test_a_run_is_planned_again_from_what_it_cost(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    finished = a_finished_run(tmp_path)
    measured = profile_run(Path(finished))
    told = run(capsys, "--from", finished, "--devices", "2xCPU", "--write", str(tmp_path / "plan"))
    assert f"measured: an update every {measured.update_s:.3g} s" in told and "in the run" not in told
    config = load_config([tmp_path / "plan/run.toml", tmp_path / "plan/fleet.toml"])
    assert (config.run.name, config.fleet.generator) == ("mine-planned", 1)
    best = json.loads(run(capsys, "--from", finished, "--devices", "2xCPU", "--json", "--set", "staleness.eta=0"))[
        "best"
    ]
    assert best["staleness"] == 0


def test_a_plan_for_more_generators_than_were_measured_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    told = run(capsys, "--from", a_finished_run(tmp_path, slower=20.0), "--devices", "2xCPU")
    assert "generators: 2, in the run 1. Full cores slow one another: plan again from a run of this fleet" in told


def test_a_fleet_that_was_planned_for_another_model_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run(capsys, str(a_run(tmp_path)), "--devices", "2xCPU", "--write", str(tmp_path / "plan"))
    path = tmp_path / "model/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 4096}))
    config = load_config([tmp_path / "plan/run.toml", tmp_path / "plan/fleet.toml"])
    with pytest.raises(
        ConfigError, match=r"the fleet was planned for a model whose config\.json has digest \.\.\w{12}, but"
    ):
        preflight(config)


def test_measured_costs_decide_where_they_are_given(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    costs = tmp_path / "costs.toml"
    costs.write_text("[generator]\ndecode_sequence_s = 0.5\n[learner]\nbase_s = 7.0\n[weights]\ntravel_base_s = 0.0\n")
    words = (str(a_run(tmp_path)), "--devices", "4xCPU", "--costs", str(costs), "--json")
    best = json.loads(run(capsys, *words))["best"]
    assert best["seconds"]["learner"] == pytest.approx(7.0)
    # 8 responses of 8 tokens, half of a second each, by four generators
    assert best["seconds"]["generator"] == pytest.approx(8 * 8 * 0.5 / 4, rel=0.01)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--devices", "8xH100"], "expected a model folder, a run file or --from RUN"),
        (["configs/demo.toml"], "--devices is missing"),
        (
            ["configs/demo.toml", "--devices", "2xCPU", "--algorithm", "ppo"],
            "--algorithm and --data are for a model folder",
        ),
        (["configs/demo.toml", "--devices", "2xTPU"], "names 'TPU', which is not known; known are A100"),
        (["configs/demo.toml", "--devices", "2xCPU", "--budget", "3"], "no price is known for CPU"),
        (["--from", "runs/none"], "runs/none"),
        (["configs/demo.toml", "--devices", "2xCPU", "--time-limit", "nan"], "--time-limit is nan; expected a finite"),
        (["configs/demo.toml", "--devices", "8xH100", "--budget", "inf"], "--budget is inf; expected a finite number"),
    ],
)
def test_bad_input_is_one_sentence(capsys: pytest.CaptureFixture[str], words: list[str], sentence: str) -> None:
    assert sentence in refused(capsys, *words)


def test_an_unknown_type_of_model_is_named_with_those_that_are_known(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    told = refused(capsys, seven(tmp_path, model_type="mamba"), "--devices", "8xH100")
    assert "type is mamba; plans know llama, mistral" in told


def test_a_model_too_large_for_the_devices_is_told_by_how_much(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    told = refused(capsys, seven(tmp_path), "--devices", "2xL4")
    assert "GB on each of them, which has 24" in told and "the learner would fit on" in told


def test_what_is_set_is_planned_and_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mine = str(a_run(tmp_path))
    for number, model in enumerate((seven(tmp_path), mine)):
        folder = tmp_path / f"plan{number}"
        words = ("--set", "staleness.eta=0", "--set", "learner.lora.rank=8", "--write", str(folder))
        devices = "8xH100" if number == 0 else "2xCPU"
        assert "staleness   at most 0" in run(capsys, model, "--devices", devices, *words)
        config = load_config([folder / "run.toml", folder / "fleet.toml"])
        assert config.staleness.eta == 0 and config.learner.lora.rank == 8
    assert "staleness.oops" in refused(capsys, mine, "--devices", "2xCPU", "--set", "staleness.oops=1")


def test_only_a_plans_own_files_are_written_over(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mine = a_run(tmp_path).rename(tmp_path / "run.toml")
    text = mine.read_text()
    assert "would include itself" in refused(capsys, str(mine), "--devices", "2xCPU", "--write", str(tmp_path))
    other = tmp_path / "other"
    other.mkdir()
    (other / "fleet.toml").write_text("[fleet]\ngenerator = 3\n")
    words = (str(mine), "--devices", "2xCPU", "--write")
    assert "is there, and no plan's; expected another folder" in refused(capsys, *words, str(other))
    assert mine.read_text() == text and not (other / "run.toml").exists()
    run(capsys, *words, str(tmp_path / "plan"))
    run(capsys, *words, str(tmp_path / "plan"))


def test_measured_costs_are_of_one_kind_of_device(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "costs.toml").write_text("[generator]\ndecode_base_s = 0.1\n[learner]\nbase_s = 7.0\n")
    words = (seven(tmp_path), "--devices", "4xH100,8xL4", "--costs", str(tmp_path / "costs.toml"))
    assert "measured costs are of one kind of device" in refused(capsys, *words)


def test_lengths_are_taken_from_measured_ones_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("100\n300\n")
    told = run(capsys, seven(tmp_path), "--devices", "8xH100", "--lengths", str(tmp_path / "lengths.txt"))
    assert "responses of 200 tokens" in told
