"""The compared variants: each table is a list of variants of a configuration, after a table of a
paper.

All variants of a table share prompts, start model, number of updates and batch. A variant is named
by what it adds or lacks. It is made by overrides alone, so ``headrace up`` can repeat it by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from ops.bench.ablation.long_chains import EVEN, TAILED, Mix

if TYPE_CHECKING:
    from collections.abc import Mapping

_CONFIGS: Final = Path("configs")

_TASK: Final = """\
**The task** is `ops/bench/ablation/long_chains.py`: a counter passes the end of its scale, downwards in
short chains (42 tokens) and upwards in long ones (257 tokens). Only right or wrong at the end
is rewarded. The first 13 tokens of a response decide it, and the start policy mostly gets them
wrong. The rule that long chains need is not taught by short ones."""

_ABOUT_DAPO: Final = f"""\
The table is DAPO's table 1 (2503.14476). Its rows add to each other; here each row lacks one part.
The paper's figures are AIME 2024 avg@32 of a 32B model. No response is over-long here, so the two
parts for over-long ones are left out everywhere.

{_TASK}"""

_ABOUT_VAPO: Final = f"""\
The table is VAPO's table 1 (2504.05118): each row lacks one part. The paper's figures are AIME 2024
avg@32 of a 32B model.

{_TASK}

**The critic** starts from a reward model, as the paper's does, with twice the policy's learning
rate. Its scale is its own, and its values of early tokens were never taught. Value pretraining is
26 steps of 32 responses. Without decoupled GAE its targets are lambda-returns with 0.95, in these
steps too.

**The adaptive lambda.** The paper's 1 - 1 / (0.05 l) is 0.996 to 0.998 at 5,000 to 10,000 tokens.
Its horizon is 250 to 500 tokens there, and that of the fixed 0.95 is 20. At 257 tokens alpha = 0.05
would give 0.92, less than 0.95. So alpha is 1 here: 0.996 at 257 tokens, a horizon of 257 against
20. That keeps the ratio of the two, not their shares of the chain."""

_ABOUT_WINDOWS: Final = f"""\
T-PPO (2506.15050) trains on a window of a response as soon as it is sampled. PPO is T-PPO with a
window as long as the cap: the objective is the same to the last bit. Imitation of right responses
is left out on both sides, or is there on both. An update trains on 128 windows of at most 90
tokens, or on 128 whole responses. Responses that are not finished go on in the next update, under
its weights. Times are for [another table](tppo-vs-ppo.md).

{_TASK}

**The critic** is as in VAPO's table. It starts from a reward model, has 26 steps before the policy,
and Monte-Carlo targets."""

_ABOUT_FACTORS: Final = """\
The source is T-PPO (2506.15050), abstract and figure 1, which compares asynchronous windows with
synchronous whole responses. Here each of the two has rows of its own: windows of 40 tokens or whole
responses, `staleness.eta` 0 (synchronous) or 2 (asynchronous). All else is the same: T-PPO's rule,
which on whole responses is PPO to the last bit, no imitation, the same critic from the same start,
64 units an update, one response to a prompt, four optimiser steps an update, as many updates.

**The task** is `ops/bench/ablation/long_chains.py` with the mix `TAILED`. A counter comes to the ends
of its scale. A response begins with its way, past the ends or back, and only its answer is
rewarded, so its first tokens decide it. Four of five chains end after 13 to 17 tokens, and the way
past is right. One in five goes on for five laps to 152 tokens, and the way back is right. The
start policy tosses a coin.

**The critic** has the start policy's layers, and learned the returns of the demonstrator's
responses before any row. All rows start from that one. The table is refused if it explains less
than 40 % of the variance of returns at window ends, of responses of the start policy that it never
saw. It learns on in each row, from finished responses.

**Pace.** Everything is learned for real by fleets. A decode step lasts at least 20 ms, and 0.1 ms
more for each live sequence, so that the longest response of an update has its price. Times are
medians of runs on two cores that other work shared: a row's time is worth its rank and no more. All
rows of a seed ran one after another. Time counts from the opening of the critic's gate."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One row of a table."""

    name: str
    config: Path
    """Run file, from the root of the project."""
    overrides: tuple[str, ...]
    is_headline: bool = False
    """Run with every seed; other rows with the first few by default."""
    paper: str = ""
    """The paper's figure for its own task, as the paper gives it."""


@dataclass(frozen=True, slots=True)
class Table:
    """Variants to compare."""

    name: str
    title: str
    about: str
    """Names the paper's table, and the differences from it."""
    variants: tuple[Variant, ...]
    mix: Mix = EVEN
    """Lengths of the chains."""
    num_prompts: int = 16_384
    """Training prompts, all different: of the shortest chains there are few."""
    is_timed: bool = False
    """Fleets make the rows, and speed is part of the result. Other tables are made in one process."""
    factors: tuple[str, ...] = ()
    """Two: the rows are all four combinations, the first factor changing fastest, absent and present."""
    rows_lack_a_part: bool = True
    """Each row lacks a part of the first row's method, which the paper has it end below."""
    every: int = 1
    """Updates from one examination of the policy to the next."""
    targets: tuple[float, ...] = ()
    """Accuracies; the page shows how soon each is reached."""


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
"""Of every row on long chains."""

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


_FACTORS: Final = (
    *_LONG,
    "run.num_updates=10",
    # examined afterwards
    "evaluation.num_prompts=1",
    "learner.learning_rate=1.5e-4",
    "fleet.generator=1",
    "generation.max_response_tokens=160",
    "generation.num_slots=192",
    "generation.steps_per_turn=4",
    "weights.poll_s=0.005",
    "emulation.decode_base_s=0.02",
    "emulation.decode_slot_s=0.0001",
    "algorithm.group_size=1",
    "algorithm.groups_per_update=64",
    "algorithm.positive_nll_coefficient=0.0",
    "algorithm.adaptive_lambda_alpha=1.0",
    "value.learning_rate=2e-4",
    "value.warmup_steps=3",
    "value.batch_trajectories=32",
    # the critic is there already
    "value.pretrain_steps=0",
)


def _factors() -> tuple[Variant, ...]:
    tppo = _CONFIGS / "tppo.toml"
    windows = {"whole responses": "generation.window_tokens=160", "windows of 40": "generation.window_tokens=40"}
    lags = {"synchronous": "staleness.eta=0", "asynchronous": "staleness.eta=2"}
    return tuple(
        Variant(f"{cut}, {lag}", tppo, (*_FACTORS, windows[cut], lags[lag]), is_headline=True)
        for lag in lags
        for cut in windows
    )


TABLES: Final[Mapping[str, Table]] = MappingProxyType(
    {
        table.name: table
        for table in (
            Table("dapo-leave-one-out", "DAPO, one part left out", _ABOUT_DAPO, _dapo(), every=3),
            Table("vapo-leave-one-out", "VAPO, one part left out", _ABOUT_VAPO, _leave_one_out(), every=3),
            Table(
                "tppo-windows",
                "T-PPO's windows against whole responses",
                _ABOUT_WINDOWS,
                _windows(),
                rows_lack_a_part=False,
                every=3,
            ),
            Table(
                "tppo-vs-ppo",
                "T-PPO against PPO: windows and asynchrony apart",
                _ABOUT_FACTORS,
                _factors(),
                mix=TAILED,
                is_timed=True,
                factors=("windows", "asynchrony"),
                rows_lack_a_part=False,
                every=2,
                targets=(0.6, 0.65),
            ),
        )
    }
)
