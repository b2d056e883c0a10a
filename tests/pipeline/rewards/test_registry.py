from __future__ import annotations

import pytest

from pipeline.rewards.registry import names, register, resolve
from protocol.errors import ConfigError


def test_the_built_in_verifiers_are_registered() -> None:
    assert {"arithmetic", "dapo_math", "math"} <= set(names())


def test_what_may_hang_is_sandboxed() -> None:
    assert resolve("math").sandboxed
    assert resolve("my_package.rewards:judge").sandboxed
    assert not resolve("arithmetic").sandboxed


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="did you mean dapo_math"):
        resolve("dapo-math")
    with pytest.raises(ConfigError, match="arithmetic, code, code_share, dapo_math, math"):
        resolve("zzz")


@pytest.mark.parametrize("path", ["", ":", "a:", ":f", "a b:f", "a.:f", "os:system()", "../x:f", "1a:f"])
def test_what_is_not_an_import_path_is_refused(path: str) -> None:
    with pytest.raises(ConfigError):
        resolve(path)
    with pytest.raises(ConfigError, match=r"package\.module:function"):
        register("a name of its own", path)


def test_a_name_means_one_function() -> None:
    register("arithmetic", "pipeline.rewards.arithmetic:verify", sandboxed=False)
    with pytest.raises(ConfigError, match=r"registered as pipeline\.rewards\.arithmetic:verify"):
        register("arithmetic", "elsewhere:verify")
