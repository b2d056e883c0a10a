"""Claims about units in the update log: all data that training reads comes back to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.algorithms import build
from pipeline.config.catalogue import rule_class
from pipeline.config.schema import RunConfig
from pipeline.config.training import DataSection, ModelSection
from pipeline.ledger.stored import read_chunk
from pipeline.ledger.types import ClaimedUnit
from pipeline.training.update_log.records import FRAME_BYTES, pack_units, unpack_units
from protocol.errors import ChecksumMismatch
from protocol.trajectory import Field, Guidance, TrajectoryChunk
from tests.pipeline.algorithms import conversations as talks
from tests.pipeline.algorithms.value_units import (
    Response,
    chunk_units,
    group_units,
    responses,
    trajectory_units,
    with_guidance,
)
from tests.protocol.samples import same
from tests.rules import make_rule

Make = Callable[[list[Response], int], list[ClaimedUnit]]
MAKES = [chunk_units, trajectory_units, group_units]


def through(units: Sequence[ClaimedUnit]) -> list[ClaimedUnit]:
    encoded = [msgspec.msgpack.encode(record) for record in pack_units(units)]
    return [
        unit
        for data in encoded
        for unit in unpack_units(msgspec.msgpack.decode(data, type=type(next(iter(pack_units(units))))))
    ]


def without_texts(chunk: TrajectoryChunk) -> TrajectoryChunk:
    prompt = msgspec.structs.replace(chunk.prompt, text="", answer="", verifier="", extra={})
    return msgspec.structs.replace(chunk, prompt=prompt, response_text=None)


@settings(deadline=None)
@given(seed=st.integers(0, 2**16), window=st.integers(1, 25), longest=st.integers(1, 60), make=st.sampled_from(MAKES))
def test_everything_but_texts_comes_back(seed: int, window: int, longest: int, make: Make) -> None:
    units = make(responses(seed, num_groups=2, group_size=3, longest=longest), window)
    back = through(units)
    assert [unit.name for unit in back] == [unit.name for unit in units]
    for before, after in zip(units, back, strict=True):
        for chunks, again in zip(before.trajectories, after.trajectories, strict=True):
            for one, other in zip(chunks, again, strict=True):
                assert same(without_texts(one.chunk), other.chunk)
                assert one.scores.keys() == other.scores.keys()
                assert all(same(score, other.scores[field]) for field, score in one.scores.items())


@pytest.mark.parametrize(
    ("name", "make", "guidance"),
    [
        ("tppo", chunk_units, "none"),
        ("ppo", trajectory_units, "none"),
        ("dapo", group_units, "none"),
        ("tppo", chunk_units, "mix"),
        ("nlft", trajectory_units, "none"),
    ],
)
def test_the_same_samples_are_made_of_what_comes_back(name: str, make: Make, guidance: str) -> None:
    config = RunConfig.model_validate(
        {
            "model": ModelSection(path=Path("m")),
            "data": DataSection(train=(Path("d"),)),
            "algorithm": {"name": name, "group_size": 4} | ({} if name == "nlft" else {"guidance": guidance}),
        }
    )
    rule = build(config)
    units = make(with_guidance(responses(3)), 6)
    samples = rule.prepare(units)
    assert any(sample.judge_logprobs is not None for sample in samples)
    for one, other in zip(samples, rule.prepare(through(units)), strict=True):
        for field in one.__dataclass_fields__:
            left, right = getattr(one, field), getattr(other, field)
            assert np.array_equal(left, right) if isinstance(left, np.ndarray) else left == right


@pytest.mark.parametrize("name", ["dapo", "vapo", "tppo"])
@given(seed=st.integers(0, 2**16), replaces=st.sampled_from([0.0, 0.5]))
@settings(max_examples=15, deadline=None)
def test_of_conversations_too_and_no_context_is_kept_twice(name: str, seed: int, replaces: float) -> None:
    make = {"dapo": talks.group_units, "vapo": talks.trajectory_units, "tppo": talks.chunk_units}[name]
    units = make(talks.conversations(seed, replaces=replaces))
    rule = make_rule(rule_class(name), group_size=3)
    for one, other in zip(rule.prepare(units), rule.prepare(through(units)), strict=True):
        for field in one.__dataclass_fields__:
            left, right = getattr(one, field), getattr(other, field)
            assert np.array_equal(left, right) if isinstance(left, np.ndarray) else left == right
    data = msgspec.msgpack.encode(list(pack_units(units)))
    assert b"told " not in data and b"said " not in data, "texts are left out"
    logged = [chunk for record in pack_units(units) for unit in record.units for t in unit.trajectories for chunk in t]
    assert name == "tppo" or all(one.is_context_cut or not read_chunk(one.blob).context_tokens.size for one in logged)


def test_texts_of_guidance_are_left_out_and_its_log_probs_are_kept() -> None:
    [drawn, *_] = [one for one in with_guidance(responses(3)) if one.score.accuracy == 0.0]
    told = Guidance(gold_text="13", judge_text="step 3 says 14, should be 13")
    drawn = replace(drawn, score=msgspec.structs.replace(drawn.score, guidance=told))
    units = trajectory_units([drawn], 6)
    assert b"should be" not in msgspec.msgpack.encode(list(pack_units(units)))
    [unit] = through(units)
    scores = unit.trajectories[0][-1].scores
    assert scores[Field.REWARD] == msgspec.structs.replace(drawn.score, guidance=None)
    assert drawn.guidance is not None and same(scores[Field.GUIDANCE], drawn.guidance)


def test_values_that_are_not_finite_come_back_as_they_were() -> None:
    [drawn, *_] = responses(1)
    bits = np.array([0x7FC00001, 0xFF800000, 0x80000000], np.uint32).view(np.float32)
    odd = replace(drawn, tokens=drawn.tokens[:3], behavior_logprobs=bits, values=bits)
    [unit] = through(trajectory_units([odd], 3))
    assert unit.trajectories[0][0].chunk.behavior_logprobs.tobytes() == bits.tobytes()


def test_a_context_that_is_not_what_the_chunks_before_say_is_kept_as_it_is() -> None:
    [drawn, *_] = [r for r in responses(2) if r.tokens.size > 8]
    [unit] = trajectory_units([drawn], 4)
    first, second, *rest = unit.trajectories[0]
    wrong = replace(
        second, chunk=msgspec.structs.replace(second.chunk, context_tokens=np.array([7, 7, 7, 7], np.int32))
    )
    [back] = through([ClaimedUnit(unit.name, ((first, wrong, *rest),))])
    assert back.trajectories[0][1].chunk.context_tokens.tolist() == [7, 7, 7, 7]


def test_long_trajectories_take_bytes_by_their_tokens_and_not_by_their_windows() -> None:
    [drawn, *_] = responses(0, num_groups=1, group_size=1, longest=2)
    size = 8192
    long = replace(
        drawn,
        tokens=np.arange(size, dtype=np.int32),
        behavior_logprobs=np.zeros(size, np.float32),
        values=np.zeros(size, np.float32),
    )
    stored = [
        sum(
            len(chunk.blob)
            for r in pack_units(trajectory_units([long], window))
            for chunk in r.units[0].trajectories[0]
        )
        for window in (8192, 256)
    ]
    assert stored[1] < 1.5 * stored[0], "contexts are stored again for every window"


def test_a_record_is_closed_at_its_size_and_no_unit_is_cut() -> None:
    [drawn, *_] = responses(0, num_groups=1, group_size=1, longest=2)
    # 4 bytes each of tokens, log-probs, reference log-probs and values
    size = FRAME_BYTES // 16
    big = replace(
        drawn,
        tokens=np.zeros(size, np.int32),
        behavior_logprobs=np.zeros(size, np.float32),
        values=np.zeros(size, np.float32),
    )
    units = trajectory_units([replace(big, member=member) for member in range(3)], size)
    assert [len(record.units) for record in pack_units(units)] == [1, 1, 1]
    assert [unit.name for unit in through(units)] == [unit.name for unit in units]
    assert list(pack_units([])) == []


def test_a_changed_blob_is_refused() -> None:
    [record] = pack_units(trajectory_units(responses(1, num_groups=1, group_size=1), 50))
    [chunk] = record.units[0].trajectories[0]
    blob = bytearray(chunk.blob)
    blob[-3] ^= 1
    bad = msgspec.structs.replace(chunk, blob=bytes(blob))
    unit = msgspec.structs.replace(record.units[0], trajectories=((bad,),))
    with pytest.raises(ChecksumMismatch):
        unpack_units(msgspec.structs.replace(record, units=(unit,)))
