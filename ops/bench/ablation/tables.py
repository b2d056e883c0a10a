"""What is compared: each table is a list of variants of a configuration, after a table of a paper.

*Consumes* nothing. *Produces* run files and overrides. *Waits for* nothing.

All variants of a table share prompts, start model, number of updates and batch. A variant is named by what it adds or lacks,
and is made by overrides alone, so that it can be repeated by hand with ``headrace up``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from ops.demo.task import MIN_TERMS

if TYPE_CHECKING:
    from collections.abc import Mapping

_CONFIGS: Final = Path("configs")

_ABOUT_LADDER: Final = """\
DAPO, table 1 (2503.14476): each row adds to the one before. The paper's figures are AIME 2024 avg@32 of a 32B model; here a
model of 193,000 parameters answers counter chains. Over-long filtering and soft punishment are both on from the fourth row,
as the table is cumulative. One response in eight is cut at the cap of 48 tokens when it is right so far."""

_ABOUT_VAPO: Final = """\
VAPO, table 1 (2504.05118): each row lacks one part. The paper's figures are AIME 2024 avg@32 of a 32B model. Groups are of 4
here. Responses are hardly longer than the 1 / alpha = 20 tokens where the paper's adaptive lambda begins; it is 0 below
them, and at most 0.58 at the cap of 48. The critic's coupled targets are lambda-returns of the values that the responses
were given."""

_ABOUT_PACED: Final = """\
T-PPO, abstract and figure 1 (2506.15050). Everything is learned for real, but decoding has the pace of an emulated
accelerator: a step lasts at least 80 ms, and 0.6 ms more for each live sequence (reading a sequence's KV cache costs 1/133 of
reading the weights: a 32B model in bf16 with contexts of about 1,800 tokens). Rollouts then dominate a synchronous update, as
they do on accelerators (about 70 % in RollPacker, 2509.21009, over 90 % in OpenRLHF, 2405.11143), and the two cores, which
stand in for the machines of all processes, have time to spare; at 40 ms they had none. Both sides have two generators, and 256
responses or windows an update, one to a prompt, and the same number of updates. Synchronous PPO decodes all of them at once,
128 on each; T-PPO keeps up to 256 live on each. Half of the right responses have 11 tokens or fewer, and of 256 the longest
nearly always 55. The table `tppo-vs-ppo-cpu` is the same without that pace. Time counts from the opening of the critic's
gate. T-PPO's imitation of right responses, which PPO lacks, is left out of the row that is compared with PPO, and shown in
a row of its own."""

_ABOUT_CPU: Final = """\
As `tppo-vs-ppo`, with decoding as fast as the processor allows. Training a token here costs about as much as sampling it, and
all processes share the cores, so that there is little waiting to save."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One row of a table."""

    name: str
    config: Path
    """Run file, from the root of the project."""
    overrides: tuple[str, ...]
    is_headline: bool = False
    """Run with every seed; other rows with the first few, unless told otherwise."""
    paper: str = ""
    """The paper's figure for its own task, as the paper gives it."""


@dataclass(frozen=True, slots=True)
class Table:
    """Variants to compare."""

    name: str
    title: str
    about: str
    """What the table repeats, and how it differs from the paper's."""
    variants: tuple[Variant, ...]
    tail_exponent: float
    """Of the law of chain lengths; see ops.demo.task."""
    min_terms: int = MIN_TERMS
    """Shortest chain; the law begins there."""
    num_prompts: int = 16_384
    """Training prompts, all different: of the shortest chains there are few."""
    is_timed: bool = False
    """Compares wall-clock times: seeds take turns, variant by variant, and speed is part of the result."""
    targets: tuple[float, ...] = ()
    """Accuracies; how soon each is reached is told."""


_COMMON: Final = ("reference.always=false", "evaluation.every_updates=0", "evaluation.num_prompts=1")

_HARD: Final = (
    *_COMMON,
    "run.num_updates=24",
    "generation.max_response_tokens=48",  # cuts the chains of 23 terms and more: there is over-length to handle
    "algorithm.num_minibatches=4",  # several steps a batch, so that ratios leave 1 and clipping matters
)

_NAIVE: Final = (
    *_HARD,
    "algorithm.clip_high=0.2",
    "algorithm.loss_aggregation=seq-mean-token-mean",
    "algorithm.dynamic_sampling=false",
    "reward.overlong=none",
)


def _ladder() -> tuple[Variant, ...]:
    demo = _CONFIGS / "demo.toml"
    steps = (
        ("naive GRPO", (), "30"),
        ("+ over-long filtering", ("reward.overlong=filter",), "36"),
        ("+ clip-higher", ("algorithm.clip_high=0.28",), "38"),
        ("+ soft over-long punishment", ("reward.overlong=soft+filter",), "41"),
        ("+ token-level loss", ("algorithm.loss_aggregation=token-mean",), "42"),
        ("+ dynamic sampling (DAPO)", ("algorithm.dynamic_sampling=true",), "50"),
    )
    variants: list[Variant] = []
    overrides = _NAIVE
    for name, added, paper in steps:
        overrides = (*overrides, *added)
        is_headline = not added or "dynamic" in name
        variants.append(Variant(name, demo, overrides, is_headline=is_headline, paper=paper))
    return tuple(variants)


_VAPO: Final = (
    *_HARD,
    "algorithm.group_size=4",
    "algorithm.groups_per_update=64",
    "algorithm.adaptive_lambda_floor=0.0",  # at 0.95, as in vapo.toml, lambda is 0.95 at any length up to the cap
    "reward.overlong=none",
    "staleness.eta=2",
)


def _leave_one_out() -> tuple[Variant, ...]:
    vapo, ppo = _CONFIGS / "vapo.toml", _CONFIGS / "ppo.toml"
    coupled = ("algorithm.adaptive_lambda_alpha=0.0", "algorithm.gae_lambda=0.95", "value.gae_lambda=0.95")
    return (
        Variant("VAPO", vapo, _VAPO, is_headline=True, paper="60"),
        Variant("w/o value pretraining", vapo, (*_VAPO, "value.pretrain_steps=0"), paper="11"),
        Variant("w/o decoupled GAE", vapo, (*_VAPO, *coupled), paper="33"),
        Variant(
            "w/o length-adaptive GAE",
            vapo,
            (*_VAPO, "algorithm.adaptive_lambda_alpha=0.0", "algorithm.gae_lambda=0.95"),
            paper="45",
        ),
        Variant("w/o clip-higher", vapo, (*_VAPO, "algorithm.clip_high=0.2"), paper="46"),
        Variant("w/o token-level loss", vapo, (*_VAPO, "algorithm.loss_aggregation=seq-mean-token-mean"), paper="53"),
        Variant("w/o positive-example loss", vapo, (*_VAPO, "algorithm.positive_nll_coefficient=0.0"), paper="54"),
        Variant(
            "w/o group sampling",
            vapo,
            (*_VAPO, "algorithm.group_size=1", "algorithm.groups_per_update=256"),
            paper="55",
        ),
        Variant(
            "vanilla PPO",
            ppo,
            (
                *_VAPO,
                "algorithm.group_size=1",
                "algorithm.groups_per_update=256",
                "algorithm.loss_aggregation=seq-mean-token-mean",
                "value.pretrain_steps=0",
                "value.gae_lambda=0.95",
            ),
            is_headline=True,
            paper="5",
        ),
    )


_PACED: Final = ("emulation.decode_base_s=0.08", "emulation.decode_slot_s=0.0006")
_RACE: Final = (
    *_COMMON,
    "generation.steps_per_turn=4",
    "run.num_updates=28",
    "algorithm.group_size=1",
    "algorithm.groups_per_update=256",
)
_WHOLE: Final = ("generation.num_slots=128", "staleness.eta=0", "generation.window_tokens=64")


def _race(*pace: str) -> tuple[Variant, ...]:
    tppo, ppo = _CONFIGS / "tppo.toml", _CONFIGS / "ppo.toml"
    return (
        Variant("PPO, synchronous, whole responses", ppo, (*_RACE, *pace, *_WHOLE), is_headline=True, paper="1x"),
        Variant(
            "T-PPO w/o imitation, windows of 32, asynchronous",
            tppo,
            (*_RACE, *pace, "generation.num_slots=256", "algorithm.positive_nll_coefficient=0.0"),
            is_headline=True,
        ),
        Variant(
            "T-PPO, windows of 32, asynchronous",
            tppo,
            (*_RACE, *pace, "generation.num_slots=256"),
            paper="up to 2.5x faster",
        ),
    )


TABLES: Final[Mapping[str, Table]] = MappingProxyType(
    {
        table.name: table
        for table in (
            Table(
                "dapo-ladder",
                "DAPO's ladder",
                _ABOUT_LADDER,
                _ladder(),
                tail_exponent=1.2,
                targets=(0.5, 0.6, 0.7),
            ),
            Table(
                "vapo-leave-one-out",
                "VAPO, one part left out",
                _ABOUT_VAPO,
                _leave_one_out(),
                tail_exponent=1.2,
                targets=(0.5, 0.6, 0.7),
            ),
            Table(
                "tppo-vs-ppo",
                "T-PPO against synchronous PPO on whole responses, decoding dominates",
                _ABOUT_PACED,
                _race(*_PACED),
                tail_exponent=2.0,
                min_terms=3,
                num_prompts=6_000,
                is_timed=True,
                targets=(0.80, 0.85, 0.88, 0.90),
            ),
            Table(
                "tppo-vs-ppo-cpu",
                "T-PPO against synchronous PPO on whole responses, at this machine's own pace",
                _ABOUT_CPU,
                _race(),
                tail_exponent=2.0,
                min_terms=3,
                num_prompts=6_000,
                is_timed=True,
                targets=(0.80, 0.85, 0.88, 0.90),
            ),
        )
    }
)
