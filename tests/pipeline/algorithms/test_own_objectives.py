"""Claims about rules and surrogates that a configuration names by import path."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.algorithms import build
from pipeline.algorithms.dapo import Dapo
from pipeline.algorithms.loss import policy_loss
from pipeline.algorithms.terms.aggregation import row_weights
from pipeline.algorithms.terms.clip import TokenLoss
from pipeline.algorithms.terms.loss_terms import LossTerms
from pipeline.config.learning import DualClipSettings, Importance
from pipeline.config.load import load_config, resolve_paths, write_resolved
from pipeline.config.unread import unread
from pipeline.ledger.types import Unit
from pipeline.preflight.engines import check_engines
from protocol.errors import ConfigError
from tests.pipeline.algorithms.own import examples, own_objectives
from tests.pipeline.algorithms.value_units import group_units, responses
from tests.pipeline.op_config import op_config, write_config
from workers.engines.check import check_loss

SINGLE = "Declaration(Unit.TRAJECTORY)\n"
HEAD = (
    "from pipeline.algorithms.dapo import Dapo\n"
    "from pipeline.algorithms.group_rule import GroupRule\n"
    "from pipeline.config.catalogue import Declaration\n"
)
BODY = (
    "    Settings = Dapo.Settings\n    token_loss = Dapo.token_loss\n"
    "    def advantages(self, responses): return responses.spread(responses.rewards)\n"
)


def own(folder: Path, module: str, text: str, attribute: str = "Mine") -> list[str]:
    """Write a rule into a module of its own; return the overrides that name it."""
    (folder / f"{module}.py").write_text(text)
    return [f"algorithm.name={module}:{attribute}", f"algorithm.path=['{folder}']"]


def test_the_examples_take_at_most_30_lines_a_file() -> None:
    assert all(len(text.splitlines()) <= 30 for text in examples())


def test_a_rule_of_ones_own_brings_its_preset_and_makes_samples(tmp_path: Path) -> None:
    folder = own_objectives(tmp_path, "presets")
    config = op_config(tmp_path, "algorithm.name=presets.rule:BoundedLeaveOneOut", f"algorithm.path=['{folder}']")
    assert isinstance(config.algorithm, DualClipSettings)
    assert (config.algorithm.clip_high, config.algorithm.dual_clip) == (0.2, 0.0)
    assert config.declaration.unit is Unit.GROUP and not unread(config)
    samples = build(config).prepare(group_units(responses(3, num_groups=2), 8))
    assert len(samples) == 8
    largest = max(float(np.abs(sample.advantages).max()) for sample in samples)
    assert largest == 1.0, "rewards of 1 and -1 are bounded"
    resolved = load_config([write_resolved(resolve_paths(config), tmp_path)])
    assert resolved.algorithm == resolve_paths(config).algorithm
    assert "algorithm.clip_high" not in resolved.algorithm.model_fields_set


def test_a_default_of_ones_own_is_checked_as_a_given_value_is() -> None:
    class Mine(Dapo):
        class Settings(Dapo.Settings, defaults={"importance": "none"}):
            pass

    assert Mine.of().sampled.importance is Importance.NONE

    class Wrong(Dapo):
        class Settings(Dapo.Settings, defaults={"clip_low": 7.0}):
            pass

    with pytest.raises(ValueError, match="less than or equal to 1"):
        Wrong.of()


def test_a_rules_own_check_refuses_a_configuration(tmp_path: Path) -> None:
    folder = own_objectives(tmp_path, "checked")
    given = ["algorithm.name=checked.rule:BoundedLeaveOneOut", f"algorithm.path=['{folder}']"]
    with pytest.raises(ConfigError, match=r"algorithm\.group_size is 2; this rule needs 3: raise it"):
        op_config(tmp_path, *given, "algorithm.group_size=2", "algorithm.groups_per_update=4")


@pytest.mark.parametrize(
    ("module", "text", "complaint"),
    [
        ("own_none", f"{HEAD}class Mine(GroupRule):\n{BODY}", "has no declaration; expected a subclass of GroupRule"),
        (
            "own_bare",
            f"{HEAD}class Mine(GroupRule):\n    declaration = Declaration()\n",
            "lacks advantages, token_loss; expected",
        ),
        (
            "own_func",
            "def Mine(): ...\n",
            "expected a subclass of GroupRule, CriticRule or ResponseRule with a declaration",
        ),
        ("own_else", "Yours = 3\n", "own_else has no 'Mine'"),
        ("own_dead", "1 / 0\n", "importing its module failed with ZeroDivisionError"),
        ("own_lone", "import nowhere_at_all\n", "importing its module failed with ModuleNotFoundError"),
        (
            "own_set",
            f"{HEAD}class Mine(Dapo):\n    class Settings(Dapo.Settings, defaults={{'clip_hi': 1}}): pass\n",
            r"the defaults of Mine.Settings have clip_hi; expected settings that it inherits",
        ),
        (
            "own_unit",
            f"{HEAD}from pipeline.ledger.types import Unit\nclass Mine(GroupRule):\n    declaration = {SINGLE}\n{BODY}",
            "declares unit trajectory and has_critic False, but a GroupRule works on whole groups",
        ),
        (
            "own_ref",
            f"{HEAD}class Mine(GroupRule):\n    declaration = Declaration(needs_reference=True)\n{BODY}",
            "reads reference log-probs, but none are computed: .* set reference.always",
        ),
    ],
)
def test_a_rule_that_is_none_is_refused_with_the_reason(tmp_path: Path, module: str, text: str, complaint: str) -> None:
    more = ["algorithm.dynamic_sampling=false"] if module == "own_unit" else []
    with pytest.raises(ConfigError, match=complaint):
        op_config(tmp_path, *own(tmp_path, module, text), *more)


def test_a_field_that_a_rule_needs_is_computed_once_the_run_is_set_to(tmp_path: Path) -> None:
    text = f"{HEAD}class Mine(GroupRule):\n    declaration = Declaration(needs_reference=True)\n{BODY}"
    config = op_config(tmp_path, *own(tmp_path, "own_has_ref", text), "reference.always=true")
    assert config.declaration.needs_reference and config.needs_reference


def test_a_module_that_is_not_found_is_answered_with_the_setting_for_folders(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"no module named 'not_there'; install it, or name its folder in algorithm.path"
    ):
        op_config(tmp_path, "algorithm.name=not_there:Mine")


def test_reading_a_configuration_never_imports_torch(tmp_path: Path) -> None:
    folder = own_objectives(tmp_path, "light")
    given = ["algorithm.name=light.rule:BoundedLeaveOneOut", f"algorithm.path=['{folder}']"]
    code = (
        "import sys; from pathlib import Path; from pipeline.config.load import load_config\n"
        f"load_config([Path({str(write_config(tmp_path))!r})], {given!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


# -- losses ----------------------------------------------------------------------------------------


def test_a_loss_of_ones_own_is_the_loss_of_each_token(tmp_path: Path) -> None:
    folder = own_objectives(tmp_path, "pulled")
    named = ("algorithm.name=pulled.losses:QuadraticPull", "algorithm.pull=0.25", "algorithm.importance=none")
    rule = build(op_config(tmp_path, *named, f"algorithm.path=['{folder}']"))
    assert not rule.reads_rows, "its loss is marked"
    logprobs = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.2, -1.9, -0.5], dtype=torch.float64)
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    loss, _ = policy_loss(
        rule,
        logprobs=logprobs,
        old_logprobs=old,
        behavior_logprobs=old,
        reference_logprobs=None,
        entropy=None,
        advantages=advantages,
        mask=torch.tensor([True, True, False]),
        row_ids=torch.tensor([0, 0, 1]),
        num_rows=2,
    )
    ratio = (logprobs - old).exp()
    expected = advantages.abs() * (ratio - 1).square() / 0.5 - advantages * ratio
    torch.testing.assert_close(loss, torch.where(torch.tensor([True, True, False]), expected, 0.0))


def test_a_loss_of_ones_own_that_is_not_marked_gets_whole_rows() -> None:
    class Mine(Dapo):
        def token_loss(self, terms: LossTerms) -> TokenLoss:
            return terms.clip(terms.ratio, self.settings)

    assert Mine.of().reads_rows and not Dapo.of().reads_rows


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("return terms.advantages", "raised RuntimeError in a trial: .* differentiable in terms.logprobs"),
        ("return terms.ratio.sum()", r"returned a loss of shape \(\), expected the loss of each of 4"),
        ("return 3", "returned int, expected the loss of each of 4 tokens"),
        ("return (terms.ratio - terms.ratio.detach()).sqrt()", "gradient .*; expected finite"),
    ],
)
def test_a_loss_without_a_gradient_is_refused_on_a_trial(
    tmp_path: Path, text: str, complaint: str, request: pytest.FixtureRequest
) -> None:
    module = f"own_loss_{abs(hash(request.node.name)) % 10**9}"
    rule = f"from pipeline.algorithms.dapo import Dapo\nclass Mine(Dapo):\n    def token_loss(self, terms): {text}\n"
    with pytest.raises(ConfigError, match=complaint):
        check_loss(build(op_config(tmp_path, *own(tmp_path, module, rule))))


TRIED = """
from pathlib import Path

from in_a_process.losses import QuadraticPull


class Mine(QuadraticPull):
    def token_loss(self, terms):
        Path(__file__).with_suffix(".tried").touch()
        return super().token_loss(terms)


def weights(counts, norm): return 1 / counts
"""


def test_config_check_tries_ones_own_losses_in_a_process_of_its_own(tmp_path: Path) -> None:
    folder = own_objectives(tmp_path, "in_a_process")
    (folder / "own_constant.py").write_text(TRIED)
    named = ("algorithm.name=own_constant:Mine", "algorithm.loss_aggregation=own_constant:weights")
    config = op_config(tmp_path, *named, f"algorithm.path=['{folder}']")
    with pytest.raises(ConfigError, match=r"returned .*expected 3 finite weights"):
        check_engines(config)
    assert (folder / "own_constant.tried").exists()


# -- aggregations ----------------------------------------------------------------------------------


def test_an_aggregation_of_ones_own_weighs_each_responses_tokens(tmp_path: Path) -> None:
    folder = own_objectives(tmp_path, "weighed")
    config = op_config(tmp_path, "algorithm.loss_aggregation=weighed.weights:root_mean", f"algorithm.path=['{folder}']")
    weights = build(config).row_weights(np.array([4, 0, 16]))
    np.testing.assert_allclose(weights, [1 / 2 / 6, 0.0, 1 / 4 / 6])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("def mine(counts, norm): return counts[1:]\n", r"returned \[2\.0\]; expected 2 finite weights"),
        ("def mine(counts, norm): return counts * -norm\n", "none below 0"),
        ("def mine(counts, norm): return counts / 0\n", "expected 2 finite weights"),
        ("def mine(counts, norm): return missing\n", "raised NameError"),
        ("mine = 3\n", "is 3; expected a function of num_loss_tokens"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_an_aggregation_without_weights_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, complaint: str, request: pytest.FixtureRequest
) -> None:
    module = f"own_weights_{abs(hash(request.node.name)) % 10**9}"
    (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=complaint):
        row_weights(np.array([1.0, 2.0]), f"{module}:mine")


def test_what_is_neither_a_mode_nor_a_path_is_refused_with_the_modes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected one of token-mean, .*, or package\.module:function of your own"):
        op_config(tmp_path, "algorithm.loss_aggregation=token-median")
