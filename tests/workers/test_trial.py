"""Claims about the responses of `headrace try`: a run's own prompts, engine and verifiers."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.rewards import EnvironmentSection
from pipeline.config.schema import RunConfig
from protocol.errors import ConfigError
from tests.small_run import small_run
from workers.trial import try_here


def changed(config: RunConfig, section: str, **fields: object) -> RunConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=fields)})


def test_prompts_are_sampled_and_judged_as_in_the_runs_first_groups(tmp_path: Path) -> None:
    config = small_run(tmp_path)
    trial = try_here(config, num_prompts=3, num_samples=2)
    assert [len(prompt.responses) for prompt in trial.prompts] == [2, 2, 2]
    for prompt in trial.prompts:
        assert prompt.text.startswith("<s>"), "as the model reads it"
        first, _, second = prompt.text.removeprefix("<s>").rstrip("=").partition("+")
        assert first == second and prompt.answer == str(2 * int(first))
        for response in prompt.responses:
            assert 0 < response.num_tokens <= config.generation.max_response_tokens
            assert response.accuracy in (0.0, 1.0) and response.reward is not None
    again = try_here(config, num_prompts=3, num_samples=2)
    assert again == trial, "the run's seed alone decides"
    other = changed(config, "run", seed=config.run.seed + 1)
    assert try_here(other, num_prompts=3, num_samples=2) != trial


def test_a_verifier_that_raises_leaves_responses_without_a_verdict_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raising.py").write_text("def judge(responses):\n    raise ValueError('no unit for this answer')\n")
    config = changed(small_run(tmp_path), "data", verifier="raising:judge")
    config = changed(config, "reward", path=(tmp_path,))
    trial = try_here(config, num_prompts=1, num_samples=2)
    assert [response.accuracy for response in trial.responses] == [None, None]
    assert "no unit for this answer" in trial.responses[0].reason
    assert trial.num_unjudged == 2


def with_environment(config: RunConfig, name: str) -> RunConfig:
    section = EnvironmentSection.model_validate({"path": f"tests.pipeline.environments.user_environments:{name}"})
    config = changed(config, "model", path=Path("ops/demo/tools_model"))
    return changed(config, "generation", max_response_tokens=64).model_copy(update={"environment": section})


def test_with_an_environment_each_conversation_is_played_to_its_end_with_its_rewards(tmp_path: Path) -> None:
    config = with_environment(small_run(tmp_path), "Shows")
    trial = try_here(config, num_prompts=2, num_samples=2)
    assert [len(prompt.responses) for prompt in trial.prompts] == [2, 2] and trial.num_unjudged == 0
    for prompt in trial.prompts:
        assert "user\n3" in prompt.text, "what `reset` began, and not the row's prompt"
    for response in trial.responses:
        if not response.is_cut:
            turns = response.text.split("<|im_end|>\n<|im_start|>user\n")
            assert [left[0] for left in turns[1:]] == ["2", "1"]
            said = [turn.rpartition("<|im_start|>assistant\n")[2].removesuffix("<|im_end|>") for turn in turns]
            assert response.parts["environment"] == sum(text.strip().isdigit() for text in said)
    assert not all(response.is_cut for response in trial.responses)


def test_an_environment_that_raises_leaves_responses_without_a_verdict_and_says_why(tmp_path: Path) -> None:
    trial = try_here(with_environment(small_run(tmp_path), "Raises"), num_prompts=1, num_samples=2)
    assert [response.accuracy for response in trial.responses] == [None, None]
    assert "no such move" in trial.responses[0].reason


def test_only_a_learner_of_ones_own_knows_the_weights_that_it_publishes_first(tmp_path: Path) -> None:
    config = changed(small_run(tmp_path), "learner", backend="ops.emulated.build:training")
    with pytest.raises(ConfigError, match="only that code knows its first weights"):
        try_here(config, num_prompts=1, num_samples=1)
