"""The tables: each is a list of variants of a configuration, after a table of a paper.

All variants of a table share prompts, start model, number of updates and batch size. A variant is named by what
it adds or lacks, and made by overrides alone, so ``headrace up`` can repeat it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_CONFIGS: Final = Path("configs")

_TASK: Final = """\
**The task** (`ops/bench/ablation/long_chains.py`): a counter passes the end of its scale, downwards in
short chains (42 tokens) and upwards in long ones (257). Only the final answer is rewarded. The first 13
tokens of a response decide it, and the start policy mostly gets them wrong. Short chains do not teach
the rule that long ones need."""

_ABOUT_DAPO: Final = f"""\
The rows follow DAPO's table 1 (2503.14476), which adds the parts one by one; here each row lacks one.
The paper's figures are AIME 2024 avg@32 of a 32B model. No response is over-long here, so DAPO's two
parts for over-long responses are off in all rows.

{_TASK}"""

_ABOUT_VAPO: Final = f"""\
The rows are those of VAPO's table 1 (2504.05118). The paper's figures are AIME 2024 avg@32 of a 32B
model.

{_TASK}

**The critic** starts from a reward model, as the paper's does, with twice the policy's learning rate.
The reward model has another scale, and was never trained on early tokens. Value pretraining is 26 steps
of 32 responses. Without decoupled GAE the critic's targets are lambda-returns with 0.95, in
pretraining too.

**The adaptive lambda.** At 5,000 to 10,000 tokens the paper's 1 - 1 / (0.05 l) is 0.996 to 0.998, a
horizon of 250 to 500 tokens against 20 with the fixed 0.95. At 257 tokens alpha = 0.05 would give 0.92,
less than 0.95, so alpha is 1 here: 0.996, a horizon of 257 against 20. That keeps the ratio of the two
horizons, not their shares of the chain."""

_ABOUT_WINDOWS: Final = f"""\
T-PPO (2506.15050) trains on each window of a response as soon as it is sampled. PPO here is T-PPO with
a window as long as the cap, which has the same objective to the last bit. Both come with and without
imitation of right responses. An update trains on 128 windows of at most 90 tokens, or on 128 whole
responses. Unfinished responses continue in the next update, under its weights.
[Another table](tppo-vs-ppo.md) measures time.

{_TASK}

**The critic** is that of [VAPO's table](vapo-leave-one-out.md): a reward model, 26 steps before the
policy's first, Monte-Carlo targets."""


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    config: Path
    """Run file, relative to the root of the project."""
    overrides: tuple[str, ...]
    is_headline: bool = False
    """Runs with every seed; other rows run with the first few by default."""
    paper: str = ""
    """The paper's figure for its own task."""


@dataclass(frozen=True, slots=True)
class Table:
    name: str
    title: str
    about: str
    """Names the paper's table, and the differences from it."""
    variants: tuple[Variant, ...]
    num_prompts: int = 16_384
    """Number of training prompts. All differ, and there are few of the shortest chains."""
    rows_lack_a_part: bool = True
    """Each row lacks a part of the first row's method, and ends below it in the paper."""
    every: int = 3
    """Updates between evaluations of the policy."""


_LONG: Final = (
    "reference.always=false",
    "evaluation.every_updates=0",
    # as the papers measure, and finer than greedy, which jumps where a habit turns
    "evaluation.temperature=1.0",
    "run.num_updates=18",
    # the longest has so many
    "data.max_prompt_tokens=20",
    # the longest right response has 259
    "generation.max_response_tokens=270",
    "generation.window_tokens=270",
    # several steps a batch, so that ratios leave 1 and clipping matters
    "algorithm.num_minibatches=4",
    "reward.overlong=none",
    "learner.learning_rate=5e-4",
    "learner.warmup_updates=3",
)
"""Overrides of every row on long chains."""

_DAPO: Final = (*_LONG, "algorithm.group_size=8", "algorithm.groups_per_update=16")
_NO_CLIP_HIGHER: Final = ("algorithm.clip_high=0.2",)
_NO_DYNAMIC: Final = ("algorithm.dynamic_sampling=false",)
_NO_TOKEN_LOSS: Final = ("algorithm.loss_aggregation=seq-mean-token-mean",)


def _dapo() -> tuple[Variant, ...]:
    demo = _CONFIGS / "demo.toml"
    return (
        Variant("DAPO", demo, _DAPO, is_headline=True, paper="50"),
        Variant("w/o clip-higher", demo, (*_DAPO, *_NO_CLIP_HIGHER)),
        Variant("w/o dynamic sampling", demo, (*_DAPO, *_NO_DYNAMIC), paper="42"),
        Variant("w/o token-level loss", demo, (*_DAPO, *_NO_TOKEN_LOSS)),
        Variant(
            "naive GRPO",
            demo,
            (*_DAPO, *_NO_CLIP_HIGHER, *_NO_DYNAMIC, *_NO_TOKEN_LOSS),
            is_headline=True,
            paper="30",
        ),
    )


_CRITIC: Final = (
    *_LONG,
    "run.num_updates=12",
    # twice the policy's, as in the papers
    "value.learning_rate=1e-3",
    "value.warmup_steps=3",
    "value.batch_trajectories=32",
    # all in all 832 responses
    "value.pretrain_steps=26",
)
_VAPO: Final = (
    *_CRITIC,
    "algorithm.group_size=4",
    "algorithm.groups_per_update=32",
    "algorithm.adaptive_lambda_alpha=1.0",
    "algorithm.adaptive_lambda_floor=0.0",
)
_FIXED: Final = ("algorithm.adaptive_lambda_alpha=0.0", "algorithm.gae_lambda=0.95")
_PPO: Final = (
    *_CRITIC,
    "algorithm.group_size=1",
    "algorithm.groups_per_update=128",
    "algorithm.gae_lambda=0.95",
    "algorithm.loss_aggregation=seq-mean-token-mean",
    "value.pretrain_steps=0",
    "value.gae_lambda=0.95",
)


def _leave_one_out() -> tuple[Variant, ...]:
    vapo, ppo = _CONFIGS / "vapo.toml", _CONFIGS / "ppo.toml"
    return (
        Variant("VAPO", vapo, _VAPO, is_headline=True, paper="60"),
        Variant("w/o value pretraining", vapo, (*_VAPO, "value.pretrain_steps=0"), is_headline=True, paper="11"),
        Variant("w/o decoupled GAE", vapo, (*_VAPO, *_FIXED, "value.gae_lambda=0.95"), is_headline=True, paper="33"),
        Variant("w/o length-adaptive GAE", vapo, (*_VAPO, *_FIXED), is_headline=True, paper="45"),
        Variant("vanilla PPO", ppo, _PPO, is_headline=True, paper="5"),
    )


_TPPO: Final = (
    *_CRITIC,
    "algorithm.group_size=4",
    "algorithm.groups_per_update=32",
    "algorithm.adaptive_lambda_alpha=1.0",
    # a third of the cap, as in T-PPO
    "generation.window_tokens=90",
)


def _windows() -> tuple[Variant, ...]:
    tppo = _CONFIGS / "tppo.toml"
    whole, alone = "generation.window_tokens=270", "algorithm.positive_nll_coefficient=0.0"
    return (
        Variant("PPO", tppo, (*_TPPO, whole, alone), is_headline=True),
        Variant("T-PPO w/o imitation", tppo, (*_TPPO, alone), is_headline=True),
        Variant("PPO with imitation", tppo, (*_TPPO, whole)),
        Variant("T-PPO", tppo, _TPPO),
    )


TABLES: Final[Mapping[str, Table]] = MappingProxyType(
    {
        table.name: table
        for table in (
            Table("dapo-leave-one-out", "DAPO, one part left out", _ABOUT_DAPO, _dapo()),
            Table("vapo-leave-one-out", "VAPO, one part left out", _ABOUT_VAPO, _leave_one_out()),
            Table(
                "tppo-windows",
                "T-PPO's windows against whole responses",
                _ABOUT_WINDOWS,
                _windows(),
                rows_lack_a_part=False,
            ),
        )
    }
)
