"""Claims about what is hidden where settings are shown."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cli import headrace
from pipeline.config.describe import Setting, settings
from pipeline.config.load import read_resolved, write_resolved
from pipeline.config.public import public_settings, public_tree, without_secrets
from tests.pipeline.op_config import op_config

HELD = [one for one in settings() if one.unit is None and one.kind != "true or false" and "one of " not in one.kind]
"""Settings that may hold a text of one's own."""
IN_TEXT = (
    "rediss://someone:{}@ledger.example:6379/0",
    "redis://:{}@h1:1,h2:2/name",
    "redis://127.0.0.1:1/0?db=1&password={}",
    "https://someone:{}@host.example/v1",
    "https://host.example/v1?token={}",
    "s3://bucket/path?secret={}",
    "--export=ALL,HF_TOKEN={}",
    "SetEnv=WANDB_API_KEY={}",
    "--password={} and more",
    "hf_token = '{}' # and more",
)
NAMES = ("hf_token", "api-key", "apiKey", "password", "AWS_SECRET_ACCESS_KEY", "passphrase", "Authorization", "key")
_AROUND = "\n".join((*IN_TEXT, *NAMES, *(one.key for one in HELD)))
SECRETS = st.text(string.ascii_letters + string.digits + "-_.~%/+", min_size=12).filter(
    # a piece of the surrounding text is shown, whatever the secret is
    lambda secret: secret not in _AROUND
)


def texts(secret: str) -> st.SearchStrategy[str]:
    return st.sampled_from(IN_TEXT).map(lambda form: form.format(secret))


def lists(secret: str) -> st.SearchStrategy[list[str]]:
    after = st.sampled_from(["--token", "--api-key", "-password"]).map(lambda option: ["run", option, secret, "last"])
    return after | texts(secret).map(lambda text: ["first", text])


def tables(secret: str) -> st.SearchStrategy[dict[str, Any]]:
    named = st.sampled_from(NAMES)
    held = st.sampled_from([secret, [secret], {"value": secret}, {"of": [{"inner": secret}]}])
    return (
        st.tuples(named, held).map(lambda pair: {"seed": 3, "more": {pair[0]: pair[1]}, pair[0]: pair[1]})
        | texts(secret).map(lambda text: {"url": text, "urls": [text]})
        | lists(secret).map(lambda words: {"arguments": words})
    )


@st.composite
def trees(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Return a secret, and settings of which one holds it in a form that it may have there."""
    secret, setting = draw(SECRETS), draw(st.sampled_from(HELD))
    return secret, tree_of(setting, draw(forms(setting, secret)))


def forms(setting: Setting, secret: str) -> st.SearchStrategy[Any]:
    if setting.kind == "table":
        return tables(secret)
    if setting.kind.startswith("list"):
        return tables(secret).map(lambda table: [table]) if "table" in setting.kind else lists(secret)
    return texts(secret)


def tree_of(setting: Setting, value: Any) -> dict[str, Any]:
    for part in reversed(setting.key.split(".")):
        value = {part: value}
    return value


@given(trees())
def test_a_secret_passes_from_no_setting_of_the_schema(given_tree: tuple[str, dict[str, Any]]) -> None:
    secret, tree = given_tree
    assert secret not in json.dumps(without_secrets(tree))


@pytest.mark.parametrize("form", IN_TEXT)
def test_a_secret_in_a_text_is_hidden_in_every_setting(form: str) -> None:
    held = form.format("of-a-test-1234")
    for setting in HELD:
        value: Any = {"x": held} if setting.kind == "table" else [held] if setting.kind.startswith("list") else held
        shown = json.dumps(without_secrets(tree_of(setting, value)))
        assert "of-a-test-1234" not in shown and "***" in shown, setting.key


def test_every_default_is_shown_as_it_is(tmp_path: Path) -> None:
    config = op_config(tmp_path)
    assert public_settings(config) == json.loads(config.model_dump_json())


def test_what_only_looks_like_a_secret_is_shown() -> None:
    shown = {
        "window_tokens": 64,
        "tokenizer": "byte",
        "api_key_env": "JUDGE_KEY",
        "use_token": True,
        "password": "",
        "url": "rediss://ledger.example/0?token=/run/ledger.token",
        "prompt": "Which key = value? Use sort(key=len).",
    }
    assert without_secrets(shown) == shown


@pytest.fixture
def with_secrets(tmp_path: Path) -> Path:
    """A run's folder whose engine, launcher and ledger have secrets."""
    config = op_config(
        tmp_path,
        "ledger.url=rediss://user:of-a-test@ledger.example/0",
        'generation.vllm.engine_args={hf_token="of-a-test", seed=3}',
        'launch.slurm.options=["--export=HF_TOKEN=of-a-test"]',
    )
    write_resolved(config, tmp_path)
    return tmp_path


def test_the_engines_of_a_run_read_their_tables_whole(with_secrets: Path) -> None:
    config = read_resolved(with_secrets)
    assert config.generation.vllm.engine_args == {"hf_token": "of-a-test", "seed": 3}
    assert config.ledger.url == "rediss://***@ledger.example/0"
    assert public_tree(with_secrets)["generation"]["vllm"]["engine_args"] == {"hf_token": "***", "seed": 3}


@pytest.mark.parametrize("form", ["--brief", "--json", None])
def test_a_shown_configuration_has_no_secret_of_an_engine_or_launcher(with_secrets: Path, form: str | None) -> None:
    words = ["config", "show", str(with_secrets / "config.toml"), *([] if form is None else [form])]
    shown = CliRunner().invoke(headrace, words)
    assert shown.exit_code == 0, shown.output
    assert "of-a-test" not in shown.output and shown.output.count("***") == 3
