"""Compiled layers have the numbers of eager ones, compile a bounded number of times, and give way."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from pipeline.process.work import Meter, listening
from tests.pipeline.op_config import op_config
from tests.rules import make_rule
from tests.workers.engines.tiny import make_samples, tiny_model
from workers.engines.model import compiled as compiled_module
from workers.engines.model.optimizer import OptimizerSettings
from workers.engines.training.policy_gradient import ForwardSettings
from workers.engines.training.torch import TorchTraining, compiler_of

# torch's tracer looks at gradients of tensors that have none
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
TRACED = "eager"
"""Cuts graphs as inductor does, and computes them as they are: in seconds."""
AOT_EAGER = "aot_eager"
"""Traces their gradients too, as inductor does: in several times as long."""
SMOOTH = OptimizerSettings(learning_rate=1e-3, eps=1e-6)


@pytest.fixture(autouse=True)
def fresh_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    torch.compiler.reset()


def training(compiler: str | None = None, *, architecture: str = "qwen3", **settings: Any) -> TorchTraining:
    forward = ForwardSettings(temperature=0.8, micro_batch_tokens=settings.pop("micro_batch_tokens", 100), **settings)
    return TorchTraining(tiny_model(architecture), forward, SMOOTH, compiler=compiler)


def assert_same_updates(one: TorchTraining, other: TorchTraining, seeds: range, tolerance: float) -> None:
    objective = make_rule(kl_coefficient=0.05, entropy_coefficient=0.01)
    for seed in seeds:
        samples = make_samples(7, seed=seed)
        pairs = zip(one.response_logprobs(samples), other.response_logprobs(samples), strict=True)
        for left, right in pairs:
            np.testing.assert_allclose(left, right, atol=tolerance, rtol=0)
        left, right = one.step(samples, objective), other.step(samples, objective)
        assert left.loss == pytest.approx(right.loss, rel=tolerance, abs=tolerance)
        assert left.grad_norm == pytest.approx(right.grad_norm, rel=tolerance)
    weights = dict(other.tensors())
    for name, tensor in one.tensors():
        torch.testing.assert_close(tensor, weights[name], atol=tolerance, rtol=0, msg=name)


@pytest.mark.parametrize("compiler", [TRACED, pytest.param(AOT_EAGER, marks=pytest.mark.long)])
def test_compiled_layers_make_the_updates_of_eager_ones_over_many_packings(compiler: str) -> None:
    meter = Meter()
    kinds: list[str] = []
    shares: list[float] = []
    step = meter.step

    def watched(share: float = 0.0) -> None:
        kinds.append(meter.report().kind)
        step(share)
        shares.append(meter.report().share or 0.0)

    meter.step = watched
    with listening(meter):
        backend = training(compiler)
    assert kinds.count("compiling") >= 4, "compiling is a task of the start, and not of the first update"
    shares = [share for kind, share in zip(kinds, shares, strict=True) if kind == "compiling"]
    assert shares == sorted(shares) and shares[0] < 0.2 < shares[len(shares) // 2] < 0.7 < shares[-1], (
        "it goes on graph by graph"
    )
    assert backend.compiled is not None and not backend.compiled.eager_because
    graphs = backend.compiled.num_graphs
    assert_same_updates(backend, training(), range(4), 2e-4)
    assert not backend.compiled.eager_because
    assert backend.compiled.num_graphs <= graphs + 2, "no shape of a micro-batch is compiled on its own"
    assert graphs <= compiled_module.MAX_GRAPHS // 2
    assert backend.environment()["layers"] == "compiled"
    assert "layers" not in training().environment()


@pytest.mark.long
def test_low_precision_and_a_head_in_parts_compile_too() -> None:
    settings = {"autocast": torch.bfloat16, "head_bytes": 20_000}
    backend = training(AOT_EAGER, architecture="llama", **settings)
    assert_same_updates(backend, training(architecture="llama", **settings), range(1), 5e-2)
    assert backend.compiled is not None and not backend.compiled.eager_because


@pytest.mark.long
@pytest.mark.parametrize("recomputed", [1, True])
def test_layers_that_recompute_their_activations_compile_too(recomputed: bool | int) -> None:
    forward = ForwardSettings(temperature=1.0, micro_batch_tokens=100)
    backends = [
        TorchTraining(tiny_model(), forward, SMOOTH, gradient_checkpointing=recomputed, compiler=compiler)
        for compiler in (AOT_EAGER, None)
    ]
    assert_same_updates(backends[0], backends[1], range(2), 2e-4)
    assert backends[0].compiled is not None and not backends[0].compiled.eager_because


@pytest.mark.long
@pytest.mark.timeout(600)
def test_inductor_has_the_numbers_of_eager_computation_and_keeps_its_graphs(tmp_path: Path) -> None:
    backend = training("inductor")
    assert backend.compiled is not None and not backend.compiled.eager_because
    assert_same_updates(backend, training(), range(4), 5e-4)
    assert not backend.compiled.eager_because
    assert any((tmp_path / "compiled").rglob("*")), "what was compiled is there for the next start"


def test_too_many_graphs_end_compiling_with_one_line_and_the_same_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_module.compile_layers, "__kwdefaults__", {"backend": TRACED, "max_graphs": 3})
    with capture_logs() as logs:
        backend = training(TRACED)
        assert_same_updates(backend, training(), range(2), 2e-4)
    told = [line for line in logs if line["event"] == "computed_eagerly"]
    assert len(told) == 1
    assert "more than 3" in told[0]["reason"] and told[0]["graphs"] >= 4
    assert backend.compiled is not None and backend.compiled.eager_because
    assert "layers" not in backend.environment()


def test_a_model_that_does_not_compile_is_computed_eagerly() -> None:
    def refuse(_graph: Any, _inputs: Any) -> Any:
        raise RuntimeError("no such kernel here\nand more of it")

    from torch._dynamo.backends import registry

    registry.register_backend(refuse, name="refuses")  # pyright: ignore[reportUnknownMemberType]
    try:
        with capture_logs() as logs:
            backend = training("refuses")
            assert_same_updates(backend, training(), range(1), 1e-6)
    finally:
        registry._BACKENDS.pop("refuses", None)
        registry._COMPILER_FNS.pop("refuses", None)
    (told,) = [line for line in logs if line["event"] == "computed_eagerly"]
    assert "no such kernel here" in told["reason"] and "\n" not in told["reason"]


def test_numbers_that_differ_from_eager_ones_end_compiling() -> None:
    def doubled(graph: Any, _inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            return tuple(
                one * 2.0 if isinstance(one, torch.Tensor) and one.is_floating_point() else one for one in graph(*args)
            )

        return run

    from torch._dynamo.backends import registry

    registry.register_backend(doubled, name="doubles")  # pyright: ignore[reportUnknownMemberType]
    try:
        backend = training("doubles")
    finally:
        registry._BACKENDS.pop("doubles", None)
        registry._COMPILER_FNS.pop("doubles", None)
    assert backend.compiled is not None and "differ" in backend.compiled.eager_because
    assert_same_updates(backend, training(), range(1), 1e-6)


def test_float64_stays_eager() -> None:
    forward = ForwardSettings(temperature=1.0, micro_batch_tokens=100)
    assert TorchTraining(tiny_model(dtype=torch.float64), forward, SMOOTH, compiler=AOT_EAGER).compiled is None


def test_graphs_are_kept_in_a_folder_of_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled_module._keep_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "compiled"), "a place that was set stays"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    compiled_module._keep_cache()
    place = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert place == tmp_path / "headrace" / "compiled"
    assert place.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("fault", ["open", "open above", "foreign", "a file", "no home"])
def test_where_others_may_put_graphs_none_are_kept_or_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    above = tmp_path / "cache" / "headrace"
    (above / "compiled").mkdir(mode=0o700, parents=True)
    match fault:
        case "open":
            (above / "compiled").chmod(0o770)
        case "open above":
            above.chmod(0o777)
        case "foreign":
            another = os.getuid() + 1
            monkeypatch.setattr("os.getuid", lambda: another)
        case "a file":
            (above / "compiled").rmdir()
            (above / "compiled").touch()
        case _:
            monkeypatch.delenv("XDG_CACHE_HOME")
            # as for an account that is in no list
            monkeypatch.setattr("os.path.expanduser", str)
    with capture_logs() as log:
        compiled_module._keep_cache()
        compiled_module._keep_cache()
    assert [line["event"] for line in log] == ["graphs_not_kept"]
    place = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert place.parent == tmp_path and place.stat().st_mode & 0o777 == 0o700


def test_layers_are_compiled_on_cuda_unless_a_setting_says_otherwise(tmp_path: Path) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for setting, expected in (("auto", (None, "inductor")), ("true", ("inductor",) * 2), ("false", (None, None))):
        given = f'"{setting}"' if setting == "auto" else setting
        config = op_config(tmp_path, f"learner.compile={given}")
        assert (compiler_of(config, cpu), compiler_of(config, cuda)) == expected
