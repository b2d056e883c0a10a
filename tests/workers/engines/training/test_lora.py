"""A LoRA adapter is all that is trained and published, others see merged weights, and a restart
goes on bit for bit."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

peft = pytest.importorskip("peft", reason="peft is not installed: make test-lora")

from pipeline.algorithms.batching import TrainingSample  # noqa: E402
from pipeline.config.learning import Importance  # noqa: E402
from pipeline.weights.digest import digest_buffer  # noqa: E402
from protocol.errors import ConfigError, DataError  # noqa: E402
from tests.rules import make_rule  # noqa: E402
from tests.workers.engines.model.test_adapter import bytes_of  # noqa: E402
from tests.workers.engines.subjects import Settings  # noqa: E402
from tests.workers.engines.tiny import VOCABULARY, make_samples, tiny_model, with_old  # noqa: E402
from tests.workers.engines.training.through_memory import ThroughMemory  # noqa: E402
from workers.engines.model.adapter import Adapter, publish_adapter, publish_base, publish_merged  # noqa: E402
from workers.engines.model.loading import load_model  # noqa: E402
from workers.engines.model.weights_file import publish_tensors, view_weights  # noqa: E402
from workers.engines.scoring.seam import ScoringRequest  # noqa: E402
from workers.engines.scoring.torch import TorchScoring  # noqa: E402
from workers.engines.training.lora import LoraSettings  # noqa: E402
from workers.engines.training.torch import TorchTraining  # noqa: E402

# transformers imports DeepSpeed to save a model, where accelerate and DeepSpeed are both installed
pytestmark = pytest.mark.filterwarnings("default")

LORA = LoraSettings(rank=4, alpha=8.0)
SETTINGS = Settings(learning_rate=1e-2, warmup_steps=2, weight_decay=0.1)


def make(
    model: PreTrainedModel | None = None, lora: LoraSettings | None = LORA, settings: Settings = SETTINGS
) -> TorchTraining:
    return TorchTraining(
        model or tiny_model(),
        settings.forward,
        settings.optimizer,
        gradient_checkpointing=settings.gradient_checkpointing,
        lora=lora,
    )


def trained(model: PreTrainedModel | None = None, settings: Settings = SETTINGS) -> TorchTraining:
    backend = make(model, settings=settings)
    for seed in range(3):
        assert backend.step(make_samples(seed=seed), make_rule()).applied
    return backend


def adapter_of(backend: TorchTraining) -> Adapter:
    adapter = backend.adapter()
    assert adapter is not None
    return adapter


def weights(backend: TorchTraining) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.tensors()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def files(backend: TorchTraining, folder: Path) -> dict[str, bytes]:
    backend.snapshot()(folder)
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# -- training --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_a_new_adapter_is_the_model_as_it_was(tied: bool) -> None:
    plain = make(tiny_model(tie_word_embeddings=tied), lora=None)
    assert same(weights(make(tiny_model(tie_word_embeddings=tied))), weights(plain))


def test_only_the_adapter_is_trained_and_has_state(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    backend = trained(model)
    backend.snapshot()(tmp_path)
    moved = set()
    for name, tensor in model.state_dict().items():
        if ".lora_" in name:
            moved.add(name)
        else:
            assert torch.equal(tensor, before[name.replace(".base_layer", "")]), name
    linear = 2 * len(("q", "k", "v", "o", "gate", "up", "down"))
    assert len(moved) == 2 * linear
    stepped = {
        label.partition("/")[2] for label in load_file(tmp_path / "optimizer.safetensors") if "rng/" not in label
    }
    assert stepped == moved
    merged = weights(backend)
    assert {name for name in merged if not torch.equal(merged[name], before[name])} == {
        name for name in before if name.endswith("_proj.weight")
    }


def test_an_adapter_on_named_layers_moves_those_alone() -> None:
    lora = replace(LORA, target_modules=("q_proj", "down_proj"))
    backend, before = make(lora=lora), weights(make(lora=None))
    for seed in range(2):
        backend.step(make_samples(seed=seed), make_rule())
    moved = {name for name, tensor in backend.tensors() if not torch.equal(tensor, before[name])}
    assert {name.split(".")[-2] for name in moved} == {"q_proj", "down_proj"} and len(moved) == 4


def test_a_step_follows_the_gradient_of_the_merged_weights() -> None:
    """B's gradient is scaling * (gradient of W) A^T: taken from plain training of the
    whole model."""
    # steps are almost exactly gradients
    settings = Settings(learning_rate=1e6, eps=1e6, max_grad_norm=1e9)
    objective, samples = make_rule(importance=Importance.NONE), make_samples()
    plain, model = make(tiny_model(dtype=torch.float64), None, settings), tiny_model(dtype=torch.float64)
    adapted, before = make(model, LORA, settings), weights(plain)
    plain.step(samples, objective)
    adapted.step(samples, objective)
    gradients = {name: before[name] - tensor for name, tensor in plain.tensors()}
    parameters = dict(model.named_parameters())
    layers = [
        name.removesuffix(".lora_A.default.weight") for name in parameters if name.endswith("lora_A.default.weight")
    ]
    for layer in layers:
        a, b = parameters[f"{layer}.lora_A.default.weight"], parameters[f"{layer}.lora_B.default.weight"]
        expected = -2.0 * gradients[f"{layer}.weight"] @ a.detach().T
        assert expected.abs().max() > 0
        torch.testing.assert_close(b.detach(), expected, rtol=1e-4, atol=1e-9)


def groups() -> list[TrainingSample]:
    """Samples in fours: one prompt, and two of the answers begin with the same token."""
    samples, rng = make_samples(8), np.random.default_rng(0)
    for start in (0, 4):
        prompt = rng.integers(2, VOCABULARY, 9).astype(np.int32)
        for member, sample in enumerate(samples[start : start + 4]):
            answer = sample.tokens[sample.prompt_length :]
            if member == 3:
                answer[0] = samples[start].tokens[prompt.size]
            tokens = np.concatenate([prompt, answer])
            samples[start + member] = replace(sample, tokens=tokens, prompt_length=prompt.size)
    return samples


def test_a_group_shares_its_prompt_below_an_adapter_with_the_gradient_of_whole_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # steps are almost exactly gradients
    settings, samples, rule = Settings(learning_rate=1e6, eps=1e6, max_grad_norm=1e9), groups(), make_rule()
    whole = sum(sample.tokens.size for sample in samples)
    changed: list[dict[str, torch.Tensor]] = []
    for shared in (True, False):
        monkeypatch.setattr("workers.engines.model.packed._has_shared_rows", lambda device, shared=shared: shared)
        seen: list[int] = []
        model = tiny_model(dtype=torch.float64)
        backend = make(model, LORA, settings)
        model.get_input_embeddings().register_forward_hook(lambda *call, seen=seen: seen.append(call[-1].shape[1]))
        for _ in range(2):
            assert backend.step(samples, rule).applied
        assert sum(seen) < 1.8 * whole if shared else sum(seen) == 2 * whole
        changed.append({name: one.detach().clone() for name, one in model.named_parameters() if one.requires_grad})
    for name, one in changed[0].items():
        assert ".lora_" in name
        torch.testing.assert_close(one, changed[1][name], rtol=1e-10, atol=1e-12, msg=name)


def test_the_reference_of_an_adapter_is_its_base_and_shares_prompts_as_well() -> None:
    model = tiny_model(dtype=torch.float64)
    reference = TorchScoring(copy.deepcopy(model), temperature=SETTINGS.forward.temperature, micro_batch_tokens=512)
    samples, seen = groups(), list[int]()
    of_adapter = make(model).response_logprobs(samples)
    reference._model.get_input_embeddings().register_forward_hook(lambda *call: seen.append(call[-1].shape[1]))
    found = reference.logprobs([ScoringRequest(s.tokens, s.response_length) for s in samples])
    assert sum(seen) < sum(sample.tokens.size for sample in samples)
    for one, other in zip(found, of_adapter, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_training_raises_the_logprob_of_what_was_rewarded() -> None:
    backend, samples = make(), make_samples(16)
    signs = [1.0 if number % 2 else -1.0 for number in range(len(samples))]
    samples = [
        replace(s, advantages=np.full(s.response_length, sign, np.float32))
        for s, sign in zip(samples, signs, strict=True)
    ]
    before = backend.response_logprobs(samples)
    for _ in range(10):
        backend.step(with_old(samples, backend.response_logprobs(samples)), make_rule())
    for sample, sign, old, new in zip(samples, signs, before, backend.response_logprobs(samples), strict=True):
        assert float((new - old)[sample.loss_mask].mean()) * sign > 0.05, sample.name


def test_gradient_checkpointing_changes_nothing() -> None:
    changed = []
    for recomputed in (False, 1, True):
        settings = replace(SETTINGS, gradient_checkpointing=recomputed)
        changed.append(weights(trained(tiny_model(dtype=torch.float64), settings)))
    assert all(same(changed[0], one) for one in changed[1:])


@pytest.mark.long
@pytest.mark.timeout(600)
def test_compiled_layers_train_an_adapter_as_eager_ones_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    changed = []
    for compiler in ("aot_eager", None):
        backend = TorchTraining(
            tiny_model(), SETTINGS.forward, SETTINGS.optimizer, gradient_checkpointing=1, lora=LORA, compiler=compiler
        )
        results = [backend.step(make_samples(7, seed=seed), make_rule()) for seed in range(3)]
        changed.append((results, weights(backend)))
        assert compiler is None or (backend.compiled is not None and not backend.compiled.eager_because)
    for one, other in zip(changed[0][0], changed[1][0], strict=True):
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
    for name, tensor in changed[0][1].items():
        torch.testing.assert_close(changed[1][1][name], tensor, rtol=0, atol=1e-4, msg=name)


def test_the_seed_alone_makes_the_adapter_and_no_stream_moves(tmp_path: Path) -> None:
    made = []
    for stream, seed in ((1, 7), (2, 7), (2, 8)):
        model = tiny_model()
        torch.manual_seed(stream)
        before = torch.get_rng_state()
        backend = make(model, replace(LORA, seed=seed))
        assert torch.equal(torch.get_rng_state(), before)
        made.append(files(backend, tmp_path / f"{stream}-{seed}")["adapter/adapter_model.safetensors"])
    assert made[0] == made[1] != made[2]


# -- publications, checkpoints and files -----------------------------------------------------------


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_published_weights_are_what_peft_merges(tmp_path: Path, architecture: str, tied: bool) -> None:
    backend = trained(tiny_model(architecture, tie_word_embeddings=tied))
    backend.snapshot()(tmp_path)
    base = tiny_model(architecture, tie_word_embeddings=tied)
    merged = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    published = weights(backend)
    assert ("lm_head.weight" in published) is not tied
    for name, tensor in published.items():
        torch.testing.assert_close(tensor, merged.get_parameter(name).detach(), rtol=0, atol=1e-6, msg=name)
    assert not same(published, weights(make(tiny_model(architecture, tie_word_embeddings=tied))))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_adapter_merged_where_it_arrives_is_the_learners_merged_file_bit_for_bit(
    architecture: str, tied: bool, dtype: str
) -> None:
    backend = trained(tiny_model(architecture, tie_word_embeddings=tied))
    adapter = adapter_of(backend)
    base = bytes_of(publish_base(adapter, dtype=dtype))
    arrived = bytes_of(publish_adapter(adapter, digest_buffer(base)))
    whole = bytes_of(publish_tensors(backend.tensors(), dtype=dtype))
    assert np.array_equal(bytes_of(publish_merged(arrived, base, digest_buffer(base), dtype=dtype)), whole)
    assert not np.array_equal(whole, base)


def test_the_base_stays_the_start_model_through_training_and_a_restart(tmp_path: Path) -> None:
    bases, backend = [], make()
    for _ in range(3):
        adapter = adapter_of(backend)
        bases.append(bytes_of(publish_base(adapter, dtype="float32")))
        backend.step(make_samples(seed=len(bases)), make_rule())
    backend.snapshot()(tmp_path)
    resumed = make()
    resumed.load(tmp_path)
    adapter = adapter_of(resumed)
    bases.append(bytes_of(publish_base(adapter, dtype="float32")))
    start = bytes_of(publish_tensors(make(lora=None).tensors(), dtype="float32"))
    assert all(np.array_equal(base, start) for base in bases)


def test_a_publication_digests_the_frozen_weights_once_and_the_adapter_as_it_is_written() -> None:
    backend = trained()
    before = backend.digests()
    base = bytes_of(publish_base(adapter_of(backend), dtype="float32"))
    backend.step(make_samples(seed=9), make_rule())
    publication = backend.publication(digest_buffer(base))
    assert publication.digests is not None and publication.digests() == backend.digests()
    moved = {name for name, digest in backend.digests().items() if digest != before[name]}
    assert moved == set(adapter_of(backend).parts) and set(view_weights(base)) == before.keys() - moved


HALF = replace(SETTINGS, autocast=torch.bfloat16)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_frozen_layers_kept_in_low_precision_give_the_numbers_that_fp32_ones_give_bit_for_bit(
    architecture: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def life(folder: Path) -> tuple[TorchTraining, list[Any]]:
        backend, told = make(tiny_model(architecture, tie_word_embeddings=tied), settings=HALF), list[Any]()
        for seed in range(3):
            told.append(backend.step(make_samples(seed=seed), make_rule()))
            told += [logprobs.tobytes() for logprobs in backend.response_logprobs(make_samples(seed=9))]
        backend.snapshot()(folder)
        return backend, told

    kept, of_kept = life(tmp_path / "kept")
    # the head of a model that is untied is the one linear layer without an adapter
    low = {name for name, parameter in kept._model.named_parameters() if parameter.dtype == torch.bfloat16}
    assert low and all(name.endswith((".base_layer.weight", ".base_layer.bias", "lm_head.weight")) for name in low)
    assert ("lm_head.weight" in low) is not tied
    with monkeypatch.context() as patch:
        patch.setattr("workers.engines.training.lora.keep_frozen_as", lambda *_: None)
        whole, of_whole = life(tmp_path / "whole")
    assert of_kept == of_whole and kept.digests() == whole.digests()
    files = [load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("kept", "whole")]
    assert same(*files)
    # a checkpoint of either goes on in the other, and its merged model is in fp32
    whole.load(tmp_path / "kept")
    kept.load(tmp_path / "whole")
    assert {tensor.dtype for tensor in load_file(tmp_path / "kept" / "model" / "model.safetensors").values()} == {
        torch.float32
    }


def test_the_merged_weights_of_a_low_precision_base_are_rounded_once(tmp_path: Path) -> None:
    backend = trained(settings=HALF)
    adapter = adapter_of(backend)
    base = bytes_of(publish_base(adapter, dtype="float32"))
    arrived = bytes_of(publish_adapter(adapter, digest_buffer(base)))
    found = view_weights(bytes_of(publish_merged(arrived, base, digest_buffer(base), dtype="float32")))
    assert same(dict(found), weights(backend))
    start = weights(make(lora=None))
    name = "model.layers.0.self_attn.q_proj"
    a, b = (tensor.double() for tensor in adapter.layers[name])
    exact = start[f"{name}.weight"].bfloat16().double() + adapter.scaling * (b @ a)
    torch.testing.assert_close(found[f"{name}.weight"].double(), exact, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_low_precision_frozen_weights_stay_as_they_are(dtype: torch.dtype) -> None:
    model = tiny_model()
    torch.nn.Module.to(model, dtype)
    backend = make(model)
    assert {parameter.dtype for parameter in backend._model.parameters()} == {dtype}


def test_layers_that_keep_their_weights_transposed_are_merged_transposed() -> None:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=512, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1
    )
    torch.manual_seed(0)
    backend = trained(GPT2LMHeadModel(config))
    adapter = adapter_of(backend)
    base = bytes_of(publish_base(adapter, dtype="float32"))
    arrived = bytes_of(publish_adapter(adapter, digest_buffer(base)))
    found = view_weights(bytes_of(publish_merged(arrived, base, digest_buffer(base), dtype="float32")))
    for name, tensor in backend.tensors():
        assert torch.equal(found[name], tensor), name
    assert not torch.equal(
        found["transformer.h.0.attn.c_attn.weight"], view_weights(base)["transformer.h.0.attn.c_attn.weight"]
    )


@pytest.mark.parametrize("tied", [True, False])
def test_the_training_model_and_the_merged_one_agree_on_every_token(tied: bool) -> None:
    backend = trained(tiny_model(tie_word_embeddings=tied))
    merged = tiny_model(seed=5, tie_word_embeddings=tied)
    assert not merged.load_state_dict(dict(backend.tensors()), strict=False).unexpected_keys
    samples = make_samples(seed=9)
    theirs = make(merged, lora=None).response_logprobs(samples)
    for left, right in zip(backend.response_logprobs(samples), theirs, strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5, rtol=0)


def test_a_checkpoint_is_a_merged_model_that_transformers_loads(tmp_path: Path) -> None:
    backend = trained()
    backend.snapshot()(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, tensor in backend.tensors():
        assert torch.equal(model.get_parameter(name), tensor), name


# -- restarts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_a_resumed_run_goes_on_bitwise_as_if_never_stopped(tmp_path: Path, tied: bool) -> None:
    through = trained(tiny_model(tie_word_embeddings=tied))
    through.snapshot()(tmp_path / "half")
    resumed = make(tiny_model(tie_word_embeddings=tied), replace(LORA, seed=77))
    resumed.step(make_samples(seed=40), make_rule())
    torch.manual_seed(1234)
    resumed.load(tmp_path / "half")
    for seed in range(3, 6):
        assert through.step(make_samples(seed=seed), make_rule()) == resumed.step(make_samples(seed=seed), make_rule())
    assert files(through, tmp_path / "through") == files(resumed, tmp_path / "resumed")


def test_a_snapshot_in_memory_holds_the_adapter_alone_and_goes_on_bitwise(tmp_path: Path) -> None:
    through, memory = trained(), ThroughMemory(tmp_path / "memory")
    assert not [spec.name for spec in through.live_state().specs if "base_layer" in spec.name]
    filled = memory.fill(through)
    after = [through.step(make_samples(seed=seed), make_rule()) for seed in range(3, 6)]
    resumed = make(tiny_model(), replace(LORA, seed=77))
    resumed.put_back(memory.read(filled))
    assert [resumed.step(make_samples(seed=seed), make_rule()) for seed in range(3, 6)] == after
    assert files(through, tmp_path / "through") == files(resumed, tmp_path / "resumed")


def test_a_snapshot_holds_the_moment_it_was_taken_at(tmp_path: Path) -> None:
    backend = trained()
    at_once = files(backend, tmp_path / "at once")
    write = backend.snapshot()
    with ThreadPoolExecutor(1) as thread:
        backend.step(make_samples(seed=5), make_rule())
        thread.submit(write, tmp_path / "late").result(timeout=60)
    late = {name: (tmp_path / "late" / name).read_bytes() for name in at_once}
    assert late == at_once != files(backend, tmp_path / "after")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [truncate, remove])
def test_a_load_that_fails_names_the_file_and_changes_nothing(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    backend = trained()
    before = weights(backend)
    for number, name in enumerate(files(backend, tmp_path / "whole")):
        folder = tmp_path / str(number)
        backend.snapshot()(folder)
        damage(folder / name)
        if name.endswith("generation_config.json"):
            # transformers loads a model without this file
            continue
        with pytest.raises(DataError, match=Path(name).name.replace(".", r"\.")):
            backend.load(folder)
        assert same(before, weights(backend))


@pytest.mark.parametrize(
    ("model", "lora", "complaint"),
    [
        ({"seed": 5}, LORA, "other weights than this run's start model; set model.path"),
        ({"num_hidden_layers": 3}, LORA, "resume with the model"),
        ({}, replace(LORA, rank=8), "has rank 4 and alpha 8.0, but learner.lora has 8 and 8.0"),
        ({}, replace(LORA, alpha=16.0), "has rank 4 and alpha 8.0, but learner.lora has 4 and 16.0"),
        ({}, replace(LORA, target_modules=("q_proj",)), "an adapter with other layers"),
        ({}, None, "optimizer.safetensors holds .* which fits no parameter"),
    ],
)
def test_a_checkpoint_of_another_adapter_or_model_is_refused(
    tmp_path: Path, model: dict[str, Any], lora: LoraSettings | None, complaint: str
) -> None:
    trained().snapshot()(tmp_path)
    backend = make(tiny_model(**model), lora)
    before = weights(backend)
    with pytest.raises(DataError, match=complaint):
        backend.load(tmp_path)
    assert same(before, weights(backend))


def test_a_checkpoint_without_an_adapter_is_refused(tmp_path: Path) -> None:
    make(lora=None).snapshot()(tmp_path)
    with pytest.raises(DataError, match=r"adapter_config\.json cannot be read"):
        make().load(tmp_path)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "input_layernorm", "no_such_layer"])
@pytest.mark.parametrize("tied", [True, False])
def test_targets_that_are_no_linear_layers_of_the_blocks_are_refused(target: str, tied: bool) -> None:
    with pytest.raises(ConfigError, match=r"learner\.lora.*target_modules"):
        make(tiny_model(tie_word_embeddings=tied), replace(LORA, target_modules=("q_proj", target)))


def test_the_adapter_of_a_checkpoint_holds_no_more_than_the_adapter(tmp_path: Path) -> None:
    trained().snapshot()(tmp_path)
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(".lora_A.weight" in name or ".lora_B.weight" in name for name in adapter)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_bytes())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8.0)


def test_frozen_layers_that_a_file_has_in_their_type_are_mapped_from_it_and_train_as_copies_do(tmp_path: Path) -> None:
    tiny_model().bfloat16().save_pretrained(tmp_path)
    (tmp_path / "other.safetensors").write_bytes(b"of another tool")

    def life(folder: Path | None) -> tuple[TorchTraining, list[Any]]:
        model = load_model(tmp_path, torch.float32, torch.device("cpu"))
        backend = TorchTraining(model, HALF.forward, HALF.optimizer, lora=LORA, tokenizer_from=folder)
        steps = [backend.step(make_samples(seed=seed), make_rule()) for seed in range(2)]
        return backend, [steps, backend.response_logprobs(make_samples(seed=9))[0].tobytes(), backend.digests()]

    (mapping, of_mapped), (copying, of_copies) = life(tmp_path), life(None)
    assert of_mapped == of_copies
    others = tiny_model().bfloat16()
    with torch.no_grad():
        for parameter in others.parameters():
            parameter.mul_(2.0)
    others.save_pretrained(tmp_path / "others")
    assert life(tmp_path / "others")[1] == of_copies, "weights of another model under the same names stay away"
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in lines if line.endswith(str(tmp_path / "model.safetensors"))]

    def is_mapped(tensor: torch.Tensor) -> bool:
        return any(int(start, 16) <= tensor.data_ptr() < int(end, 16) for start, end in ranges)

    for backend, wanted in ((mapping, True), (copying, False)):
        low = [tensor for tensor in backend._model.parameters() if tensor.dtype == torch.bfloat16]
        assert low and [is_mapped(tensor) for tensor in low] == [wanted] * len(low)


def test_the_base_is_published_from_the_live_weights_without_a_copy_of_them() -> None:
    backend = make(settings=HALF)
    live = {parameter.data_ptr() for parameter in backend._model.parameters()}
    assert {tensor.data_ptr() for _, tensor in adapter_of(backend).below()} <= live
