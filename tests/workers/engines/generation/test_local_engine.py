"""The local engine keeps the generation contract, and its cache costs only the live tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from pipeline.config.runtime import GenerationSection
from pipeline.config.schema import RunConfig
from pipeline.config.training import DataSection, ModelSection
from pipeline.process import work
from protocol.errors import ConfigError, DataError, EngineError
from protocol.ids import TrajectoryId
from tests.workers.engines.generation_contract import drain, request
from tests.workers.engines.model_contract import ModelContract, published
from tests.workers.engines.tiny import VOCABULARY, tiny_model, tiny_tokenizer
from workers.engines.build import build_engine
from workers.engines.generation.local import dense, forward, prompts
from workers.engines.generation.local.cache import SlotCache, SlotLayer
from workers.engines.generation.local.engine import LocalEngine
from workers.engines.generation.local.slots import SlotTable
from workers.engines.generation.seam import GenerationEngine, SampledWindow
from workers.engines.model.loading import load_model, resolve_device, resolve_dtype


class LocalContract(ModelContract):
    def make_engine(
        self,
        model: PreTrainedModel,
        *,
        num_slots: int,
        stop: Iterable[int] = (1,),
        kv_policy: Literal["keep", "recompute"] = "keep",
    ) -> GenerationEngine:
        return LocalEngine(
            model, num_slots=num_slots, stop_token_ids=stop, kv_policy=kv_policy, tokenizer=tiny_tokenizer()
        )


class TestLocalEngineByTransformers(LocalContract):
    """Models that are large or of another family than the dense one are run by transformers' own
    forward."""

    @pytest.fixture(autouse=True)
    def every_model_is_large(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dense, "MOST_WEIGHTS", {"cpu": 0, "other": 0})


class TestLocalEngineThatSharesEveryPrompt(LocalContract):
    @pytest.fixture(autouse=True)
    def every_prompt_is_long(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prompts, "LEAST_SHARED", 1)
        join = prompts.SharedPrompts.join
        monkeypatch.setattr(
            prompts.SharedPrompts, "join", lambda held, tokens, is_group: join(held, tokens, is_group=True)
        )


class TestLocalEngine(LocalContract):
    def test_members_of_a_group_share_the_prefill_of_their_prompt(self, start) -> None:
        engine = start(num_slots=8)
        for number in range(4):
            engine.submit(request(number, prompt=range(2, 22)))
        engine.advance(1)
        assert engine.stats().num_prefill_tokens == 19

    @pytest.mark.parametrize("is_apart", [True, False])
    def test_only_a_prefill_in_a_pass_of_its_own_is_reported_as_one(
        self, start, monkeypatch: pytest.MonkeyPatch, is_apart: bool
    ) -> None:
        if is_apart:
            monkeypatch.setattr(forward, "JOINED_TOKENS", 0)
        engine, meter = start(num_slots=2), work.Meter()
        engine.submit(request(0, prompt=range(2, 22)))
        with work.listening(meter):
            engine.advance(1)
        assert [(sums.pieces, sums.size) for sums in meter.service().values()] == ([(1, 19.0)] if is_apart else [])

    def test_a_member_that_enters_later_copies_the_prompt_unless_the_weights_are_new(self, start, new) -> None:
        alone, engine = start(num_slots=8), start(num_slots=8)
        prompt = range(2, 22)
        engine.submit(request(0, prompt=prompt))
        engine.submit(request(1, prompt=range(3, 23)))
        engine.advance(2)
        engine.submit(request(2, prompt=prompt))
        engine.submit(request(3, prompt=[*prompt, 22]))
        engine.advance(1)
        assert engine.stats().num_prefill_tokens == 19 + 19 + 20
        engine.load_weights(published(new), 1)
        engine.submit(request(4, prompt=prompt))
        engine.advance(1)
        assert engine.stats().num_prefill_tokens == 19 + 19 + 20 + 19
        engine.submit(request(5, prompt=prompt))
        found = drain(engine)[request(5).trajectory]
        assert engine.stats().num_prefill_tokens == 19 + 19 + 20 + 19
        alone.load_weights(published(new), 1)
        alone.submit(request(5, prompt=prompt))
        expected = drain(alone)[request(5).trajectory]
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_allclose(found.behavior_logprobs, expected.behavior_logprobs, atol=1e-5)

    @pytest.mark.parametrize("num_slots", [3, 12])
    @pytest.mark.parametrize("policy", ["keep", "recompute"])
    def test_a_group_stores_its_prompt_once_and_samples_what_its_members_sample_alone(
        self, start, new, monkeypatch: pytest.MonkeyPatch, policy: Literal["keep", "recompute"], num_slots: int
    ) -> None:
        rng = np.random.default_rng(0)
        # two groups of five, a lone prompt that is as long, and one that is too short to be shared
        given = [rng.integers(2, VOCABULARY, size) for size in (200, 170, 190, 5)]
        numbers = {**dict.fromkeys(range(5), 0), **dict.fromkeys(range(8, 13), 1), 20: 2, 24: 3}

        def sampled(least: int) -> tuple[dict[TrajectoryId, SampledWindow], int]:
            monkeypatch.setattr(prompts, "LEAST_SHARED", least)
            engine = start(num_slots=num_slots, stop=(), kv_policy=policy)
            for number, group in numbers.items():
                engine.submit(request(number, prompt=given[group], window=6 + number))
            ended = {window.trajectory: window for window in engine.advance(4)}
            computed = engine.stats().num_prefill_tokens
            engine.load_weights(published(new), 1)
            ended |= drain(engine)
            assert engine.cache_bytes > 0, "rows are retained for the next windows"
            for window in ended.values():
                engine.forget(window.trajectory)
            assert engine.cache_bytes == 0
            return ended, computed

        (whole, _), (shared, computed) = sampled(1_000), sampled(100)
        if num_slots == 12:
            assert computed == sum(prompt.size - 1 for prompt in given)
        assert shared.keys() == whole.keys()
        for trajectory, window in shared.items():
            np.testing.assert_array_equal(window.tokens, whole[trajectory].tokens)
            np.testing.assert_allclose(window.behavior_logprobs, whole[trajectory].behavior_logprobs, atol=1e-5)

    def test_advance_returns_early_when_a_slot_falls_free_and_nobody_waits_for_it(self, start) -> None:
        engine = start(num_slots=2, stop=())
        engine.submit(request(0, window=3))
        engine.submit(request(1, window=9))
        engine.submit(request(2, window=4))
        # the slot of the first goes to the third at once; only when that ends does a slot stay free
        assert [w.trajectory.member for w in engine.advance(100)] == [0, 2]
        assert engine.stats().num_decode_steps == 7
        assert [w.trajectory.member for w in engine.advance(1)] == []
        assert [w.trajectory.member for w in engine.advance(100)] == [1]
        assert engine.stats().num_decode_steps == 9

    def test_cache_memory_follows_need_and_is_given_back(self, start) -> None:
        engine = start(num_slots=32, stop=())
        # keys and values, layers, key heads, head dim, float32
        bytes_per_token = 2 * 2 * 2 * 32 * 4
        engine.submit(request(0, window=10))
        engine.advance(1)
        assert engine.cache_bytes == 8 * 64 * bytes_per_token
        for number in range(1, 12):
            engine.submit(request(number, window=10))
        engine.advance(1)
        assert engine.cache_bytes <= 16 * 64 * bytes_per_token
        drain(engine)
        for number in range(12):
            engine.forget(request(number).trajectory)
        assert engine.cache_bytes == 0

    def test_damaged_weights_are_named_and_not_sampled_from(self, start, new) -> None:
        engine = start()
        engine.submit(request())
        weights = published(new)
        weights["model.norm.weight"][0] = torch.nan
        engine.load_weights(weights, 9)
        with pytest.raises(EngineError, match="version 9"):
            engine.advance(1)

    def test_bfloat16_serves_float32_weights(self, old) -> None:
        engine = LocalEngine(tiny_model(dtype=torch.bfloat16), num_slots=4, stop_token_ids=(1,))
        engine.load_weights(published(old), 0)
        for number in range(6):
            engine.submit(request(number))
        assert len(drain(engine)) == 6

    def test_slot_attention_without_a_step_is_refused(self) -> None:
        from workers.engines.generation.local.cache import slot_attention

        states = torch.zeros(1, 2, 1, 32)
        with pytest.raises(EngineError, match="without a step"):
            slot_attention(torch.nn.Identity(), states, states, states)


@given(data=st.data(), num_slots=st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_rows_hold_their_own_trajectory_in_any_order_of_admissions_ends_and_returns(
    data: st.DataObject, num_slots: int
) -> None:
    """Drive the table as the engine does; each cached key names the trajectory and position it
    belongs to."""
    cache = SlotCache(1, num_slots)
    table = SlotTable(num_slots, cache)
    layer = cache.layers[0]
    assert isinstance(layer, SlotLayer)
    contexts = {n: np.full(1 + n % 5, n + 2, np.int32) for n in range(10)}

    def check() -> None:
        assert all(o is not None and o.is_live for o in table.occupants[: table.num_live])
        assert not any(o.is_live for o in table.occupants[table.num_live :] if o is not None)
        for row, occupant in enumerate(table.occupants):
            if occupant is None:
                continue
            number = occupant.trajectory.group
            assert occupant.row == row
            assert table.find(occupant.trajectory) is occupant
            np.testing.assert_array_equal(table.context(row), contexts[number])
            assert layer.keys is not None
            stored = layer.keys[row, 0, : contexts[number].size - 1, 0]
            assert (stored == number).all()

    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["enter", "end", "retain", "evict"]))
        if action == "enter" and table.num_live < num_slots:
            number = data.draw(st.integers(0, 9))
            asked = replace(request(prompt=contexts[number], window=4), trajectory=TrajectoryId("t", number, 0))
            held = table.find(asked.trajectory)
            if held is not None and held.is_live:
                continue
            if table.revive(asked, contexts[number]) is None:
                occupant = table.admit(asked, contexts[number])
                cache.reserve(occupant.row + 1, 8)
                if layer.keys is None:
                    layer.lazy_initialization(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))
                assert layer.keys is not None
                layer.keys[occupant.row] = number
        elif action in ("end", "retain") and table.num_live:
            live = table.live()
            for occupant in data.draw(st.lists(st.sampled_from(live), unique_by=id, min_size=1)):
                table.end(occupant, retain=action == "retain")
            table.settle()
        elif action == "evict":
            table.evict_retained()
        check()


# -- loading ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model(seed=3).save_pretrained(path)
    vocabulary = {"<pad>": 0, "</s>": 1} | {chr(97 + n): 2 + n for n in range(20)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>").save_pretrained(path)
    return path


def configuration(model: Path) -> RunConfig:
    """Make the configuration of a run whose engine has four slots and stops at token 7 too."""
    return RunConfig(
        model=ModelSection(path=model),
        data=DataSection(train=(Path("train.jsonl"),)),
        generation=GenerationSection(engine="local", num_slots=4, device="cpu", stop_token_ids=(7,)),
    )


def test_an_engine_from_a_folder_stops_at_the_tokenizers_and_the_configured_tokens(folder: Path) -> None:
    engine = build_engine(configuration(folder))
    assert (engine.num_slots, engine.policy_version) == (4, -1)
    engine.load_weights(published(tiny_model(seed=3)), 0)
    for number in range(12):
        engine.submit(request(number, window=200, limit=200))
    endings = {int(window.tokens[-1]) for window in drain(engine).values()}
    assert endings <= {1, 7}
    assert len(endings) == 2


def test_a_missing_or_wrong_model_folder_is_a_data_error_that_names_it(folder: Path, tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    with pytest.raises(DataError, match="is not a folder"):
        load_model(tmp_path / "nowhere", torch.float32, cpu)
    with pytest.raises(DataError, match=r"has no config\.json"):
        load_model(tmp_path, torch.float32, cpu)
    (tmp_path / "config.json").write_text("{ not json")
    with pytest.raises(DataError, match="does not load"):
        load_model(tmp_path, torch.float32, cpu)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(DataError, match="does not load"):
        load_model(tmp_path, torch.float32, cpu)


def test_devices_and_types_are_resolved_or_refused_by_name() -> None:
    assert resolve_device("cpu").type == "cpu"
    assert resolve_device("auto").type in ("cpu", "cuda")
    assert resolve_dtype("bfloat16") is torch.bfloat16
    for wrong in ("gpu", "cuda:99"):
        with pytest.raises(ConfigError, match=wrong):
            resolve_device(wrong)
    with pytest.raises(ConfigError, match="float99"):
        resolve_dtype("float99")
    assert VOCABULARY == 64


def _noised(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor + 1e-6 for name, tensor in published(model).items()}


@pytest.mark.parametrize("is_dense", [True, False])
def test_loaded_weights_are_served_and_silently_kept_ones_are_named(
    monkeypatch: pytest.MonkeyPatch, is_dense: bool
) -> None:
    if not is_dense:
        monkeypatch.setattr(dense, "MOST_WEIGHTS", {"cpu": 0, "other": 0})
    model = tiny_model(seed=1)
    engine = LocalEngine(model, num_slots=2, stop_token_ids=(1,))
    first, second = published(tiny_model(seed=2)), published(tiny_model(seed=3))
    engine.load_weights(first, 0)
    assert engine.unserved(first) == []
    assert len(engine.unserved(second)) > 0
    assert len(engine.unserved(_noised(tiny_model(seed=2)))) > 0, (
        "an update of a small learning rate is another version, too"
    )
    monkeypatch.setattr("workers.engines.generation.local.forward.replace_weights", lambda *_: None)
    engine.load_weights(second, 1)
    assert len(engine.unserved(second)) > 0


@pytest.mark.parametrize("least_packed", [0, 1 << 40])
def test_copies_of_the_dense_forward_that_are_not_made_again_are_found(
    monkeypatch: pytest.MonkeyPatch, least_packed: int
) -> None:
    monkeypatch.setattr(dense, "LEAST_PACKED", {torch.float32: least_packed})
    engine = LocalEngine(tiny_model(seed=1), num_slots=2, stop_token_ids=(1,))
    engine.load_weights(published(tiny_model(seed=2)), 0)
    take, new = dense.DenseForward.take_weights, published(tiny_model(seed=3))
    monkeypatch.setattr(dense.DenseForward, "take_weights", lambda self: None)
    engine.load_weights(new, 1)
    monkeypatch.setattr(dense.DenseForward, "take_weights", take)
    assert engine.unserved(new) == ["(copies of the dense forward)"]
    assert engine.unserved(new) == []


def test_weights_that_are_not_finite_are_served_like_others() -> None:
    engine = LocalEngine(tiny_model(seed=1), num_slots=2, stop_token_ids=(1,))
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in published(tiny_model(seed=2)).items()}
    engine.load_weights(broken, 0)
    assert engine.unserved(broken) == []
