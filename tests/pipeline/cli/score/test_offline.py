from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline.cli import main
from pipeline.cli.score.command import score
from pipeline.cli.score.offline import score_file
from pipeline.config.training import RewardSection
from pipeline.rewards.pool import VerifierPool
from pipeline.rewards.verifier import Response
from pipeline.runtime.machine import Machine
from protocol.errors import ConfigError, DataError

LINES: list[dict[str, Any]] = [
    {"response": "is 4", "answer": 4, "verifier": "arithmetic", "num_tokens": 10, "kind": "a"},
    {"response": "is 5", "answer": "4", "verifier": "arithmetic", "num_tokens": 30, "kind": "a"},
    {"response": "is 4", "answer": "four", "verifier": "arithmetic", "num_tokens": 20, "kind": "b"},
    {"response": "Answer: 4", "answer": "4", "verifier": "dapo_math", "num_tokens": 20, "kind": "b"},
    {"response": "is 9", "answer": "4", "verifier": "arithmetic", "num_tokens": 100, "finish_reason": "length"},
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "responses.jsonl"
    broken = [
        '{"response": "4"',
        '{"answer": "4"}',
        '{"response": "4", "answer": " "}',
        '{"response": "4", "answer": "4"}',
    ]
    path.write_text("\n".join([*map(json.dumps, LINES), *broken]) + "\n")
    return path


def test_a_file_is_counted_line_by_line(file: Path) -> None:
    report = score_file(file, by="kind")
    assert (report.num_responses, report.num_scored, report.num_correct, report.accuracy) == (5, 4, 2, 0.5)
    assert report.failures == {"bad_answer": 1}
    assert report.failure_examples[0].startswith(f"{file}:3: the answer 'four'")
    assert report.num_bad_lines == 4
    assert [line.split(": ")[0] for line in report.bad_lines] == [f"{file}:{n}" for n in (6, 7, 8, 9)]
    assert report.reward is not None
    assert report.reward.mean == 0.0
    assert report.length_unit == "tokens"
    assert report.correct_lengths is not None
    assert report.correct_lengths.mean == 15.0
    assert [(g.value, g.num_responses, g.num_failed, g.accuracy) for g in report.groups] == [
        ("(absent)", 1, 0, 0.0),
        ("a", 2, 0, 0.5),
        ("b", 2, 1, 1.0),
    ]


def test_shaping_is_that_of_the_reward_worker(file: Path) -> None:
    config = RewardSection(overlong="soft+filter", overlong_cache_tokens=20)
    report = score_file(file, config=config, max_response_tokens=100)
    assert report.num_masked == 1
    assert report.parts == {"correct": 0.0, "overlong": -0.25}
    assert report.reward is not None
    assert report.reward.min == -2.0
    with pytest.raises(ConfigError, match="max_response_tokens"):
        score_file(file, config=config)


def test_a_named_verifier_overrides_the_lines(file: Path) -> None:
    report = score_file(file, "tests.pipeline.rewards.user_verifiers:raises")
    assert report.accuracy is None
    assert report.failures == {"raised": report.num_responses}
    assert "KeyError" in report.failure_examples[0]


@pytest.mark.parametrize(
    ("name", "content", "verifier", "error", "says"),
    [
        ("none.jsonl", None, "arithmetic", DataError, "no such file"),
        ("empty.jsonl", "", "arithmetic", DataError, "empty"),
        ("bad.jsonl", "x\n", "arithmetic", DataError, "bad.jsonl:1"),
        ("text.txt", "x\n", "arithmetic", DataError, "expected .jsonl or .parquet"),
        ("ok.jsonl", '{"response": "1", "answer": "1"}\n', "aritmetic", ConfigError, "did you mean arithmetic"),
        ("ok.jsonl", '{"response": "1", "answer": "1"}\n', "no_such_module:judge", ConfigError, "--path"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    tmp_path: Path, name: str, content: str | None, verifier: str, error: type[Exception], says: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(error, match=says):
        score_file(tmp_path / name, verifier)


def test_the_command_prints_a_table_or_json(file: Path) -> None:
    table = CliRunner().invoke(score, [str(file), "--by", "kind"], catch_exceptions=False)
    assert "accuracy 50.0%" in table.output
    assert "no verdict: bad_answer" in table.output
    printed = CliRunner().invoke(score, [str(file), "--by", "kind", "--json"], catch_exceptions=False)
    assert json.loads(printed.stdout) == json.loads(json.dumps(asdict(score_file(file, by="kind"))))


WRONG = [
    {"response": "3 * 4 = 13", "answer": "12", "judgment": "13 is wrong"},
    {"response": "so 13", "answer": "12"},
    {"response": "3 * 4 = 12", "answer": "12", "judgment": "nothing is"},
    {"response": "so 14", "answer": "twelve"},
]


def test_judgments_of_wrong_responses_are_counted_shown_and_written(tmp_path: Path) -> None:
    path, out = tmp_path / "wrong.jsonl", tmp_path / "verdicts.jsonl"
    path.write_text("\n".join(map(json.dumps, WRONG)))
    report = score_file(path, "arithmetic", judgments="arithmetic", out=out)
    assert (report.num_scored, report.num_judgments, report.judgments_absent) == (3, 1, {"nothing_found": 1})
    assert report.judgment_examples[0] == f"{path}:1: step 1 says 3 * 4 = 13, should be 12"
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line.get("judgment") for line in written] == ["step 1 says 3 * 4 = 13, should be 12", None, None, None]
    assert written[1]["judgment_absent"].startswith("nothing_found: ")
    assert "judgment_absent" not in written[2] and written[3]["failure"] == "bad_answer"
    assert score_file(path, "arithmetic").num_judgments == 0, "none are asked for"


def test_judgments_are_those_of_the_run_file_unless_others_are_named(tmp_path: Path) -> None:
    path = tmp_path / "wrong.jsonl"
    path.write_text(json.dumps(WRONG[0]))
    (tmp_path / "run.toml").write_text(
        '[model]\npath = "m"\n[data]\ntrain = ["t.jsonl"]\nverifier = "arithmetic"\n'
        '[algorithm]\nguidance = "mix"\n[guidance]\njudgments = "recorded"\n'
    )
    given = [str(path), "--config", str(tmp_path / "run.toml"), "--json"]
    assert ":1: 13 is wrong" in json.loads(_printed(given))["judgment_examples"][0]
    assert "step 1 says" in json.loads(_printed([*given, "--judgments", "arithmetic"]))["judgment_examples"][0]


def _printed(arguments: list[str]) -> str:
    return CliRunner().invoke(score, arguments, catch_exceptions=False).stdout


def test_a_judgment_does_nothing_to_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "wrong.jsonl"
    path.write_text(json.dumps({"response": "13", "answer": "12", "judgment": "13\x1b[2J is\x07 wrong"}))
    printed = _printed([str(path), "--verifier", "arithmetic", "--judgments", "recorded"])
    assert "is" in printed and "\x1b" not in printed and "\x07" not in printed


HOSTILE = {
    "a list for a reason": {"finish_reason": []},
    "a map for a reason": {"finish_reason": {"a": 1}},
    "a count beyond any": {"num_tokens": 10**400},
    "a long text for a count": {"num_tokens": "9" * 1_000_000},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_column_makes_a_bad_line_and_nothing_worse(tmp_path: Path, name: str) -> None:
    path = tmp_path / "responses.jsonl"
    good = {"response": "4", "answer": "4", "num_tokens": 1}
    path.write_text("\n".join(json.dumps(line) for line in (good, good | HOSTILE[name])))
    report = score_file(path, "arithmetic")
    assert (report.num_responses, report.num_bad_lines) == (1, 1)
    assert "expected" in report.bad_lines[0]
    assert len(report.bad_lines[0]) < 1_000


def test_what_score_prints_of_a_file_is_cut_and_moves_no_cursor(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    lines = [
        {"response": "4", "answer": "\x1b[2Jfour", "verifier": "arithmetic", "kind": "\x1b[31m" + "k" * 10_000},
        {"response": "4", "answer": "4", "verifier": "\x9b2J" + "v" * 100_000},
        {"\x1b]0;title\x07": 1, "x" * 1_000_000: 2},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    shown = CliRunner().invoke(score, [str(path), "--by", "kind"], catch_exceptions=False).output
    assert not set(shown) & set("\x1b\x9b\x07")
    assert len(shown) < 50_000


def test_every_line_gets_its_verdict_and_reason_in_the_file_of_verdicts(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "verdicts.jsonl"
    CliRunner().invoke(score, [str(file), "--out", str(out)], catch_exceptions=False)
    verdicts = [json.loads(line) for line in out.read_text().splitlines()]
    assert [verdict["line"] for verdict in verdicts] == list(range(1, 10))
    assert [verdict.get("accuracy") for verdict in verdicts[:5]] == [1.0, 0.0, None, 1.0, 0.0]
    assert verdicts[2]["failure"] == "bad_answer"
    assert "not a number" in verdicts[2]["error"]
    assert verdicts[0]["parts"] == {"correct": 1.0}
    assert all(verdict["unreadable"] for verdict in verdicts[5:])
    reasons = tmp_path / "responses2.jsonl"
    reasons.write_text(json.dumps({"response": "The answer is 4 or 5.", "answer": "4"}) + "\n")
    score_file(reasons, "math_strict", out=out)
    assert json.loads(out.read_text())["reason"] == "alternatives"


def test_the_verdicts_never_replace_the_responses(file: Path) -> None:
    before = file.read_bytes()
    with pytest.raises(ConfigError, match="would replace the responses"):
        score_file(file, out=file)
    assert file.read_bytes() == before


USER = "tests.pipeline.rewards.user_verifiers"


@pytest.mark.parametrize(
    ("lines", "options", "code"),
    [
        ([{"response": "4", "answer": "4"}, {"response": "5", "answer": "4"}], ["--verifier", "arithmetic"], 0),
        ([{"response": "4", "answer": "four"}], ["--verifier", "arithmetic"], 11),
        ([{"response": "4", "answer": "4"}, {"answer": "4"}], ["--verifier", "arithmetic"], 11),
        ([{"response": "go", "answer": "4"}], ["--verifier", f"{USER}:hangs_when_told"], 0),
        ([{"response": "hang", "answer": "4"}], ["--verifier", f"{USER}:hangs_when_told", "--timeout", "0.3"], 11),
    ],
)
def test_the_exit_status_says_whether_every_response_was_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: list[dict[str, str]], options: list[str], code: int
) -> None:
    path = tmp_path / "responses.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(SystemExit) as ending:
        main(["score", str(path), *options])
    assert ending.value.code == code
    printed = capsys.readouterr()
    assert f"scoring {len(lines)} lines" in printed.err
    assert ("no verdict: late" in printed.out) == ("hang" in str(lines) and code == 11)


async def test_a_pool_tells_of_every_response_as_it_is_judged(tmp_path: Path) -> None:
    told: list[int] = []
    async with VerifierPool(RewardSection(), configured={f"{USER}:equals"}) as pool:
        names = ["arithmetic", "arithmetic", f"{USER}:equals", "no_such_verifier", f"{USER}:equals"]
        asked = [Response(response_text="1", answer="1", verifier=name) for name in names]
        await pool.score(asked, on_judged=told.append)
    assert told == [1, 2, 1, 1]


def test_one_process_a_core_is_used_unless_a_number_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []

    def kept(path: Path, verifier: str | None, **options: Any) -> Any:
        used.append(options["config"].processes)
        return score_file(path, verifier, **options)

    monkeypatch.setattr("pipeline.cli.score.offline.score_file", kept)
    monkeypatch.setattr("pipeline.cli.score.offline.this_machine", lambda: Machine(num_cores=5, memory_bytes=1 << 30))
    path = tmp_path / "responses.jsonl"
    path.write_text(json.dumps({"response": "4", "answer": "4"}))
    for options in ([], ["--processes", "3"]):
        CliRunner().invoke(score, [str(path), "--verifier", "arithmetic", *options], catch_exceptions=False)
    assert used == [5, 3]


def test_pass_rates_become_a_file_to_train_on_with_a_difficulty(tmp_path: Path) -> None:
    given = [("a", "4"), ("b", "4"), ("a", "5"), ("a", "4"), ("a", "4"), ("b", "4")]
    lines = [{"prompt": prompt, "response": f"is {text}", "answer": "4"} for prompt, text in given]
    path, rates = tmp_path / "responses.jsonl", tmp_path / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    score_file(path, "arithmetic", pass_rates=rates)
    first, second = map(json.loads, rates.read_text().splitlines())
    assert (first["prompt"], first["pass_rate"], first["difficulty"], first["num_judged"]) == ("a", 0.75, 0.25, 4)
    assert (second["prompt"], second["difficulty"], second["verifier"]) == ("b", 0.0, "arithmetic")
    path.write_text(json.dumps({"response": "is 4", "answer": "4"}))
    with pytest.raises(DataError, match="no judged line has a `prompt`"):
        score_file(path, "arithmetic", pass_rates=rates)
