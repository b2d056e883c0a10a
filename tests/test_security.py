"""Promises of SECURITY.md about the source and files: nothing is unpickled, no code comes with
data, no password is kept."""

from __future__ import annotations

import ast
import json
import shutil
import socket
import ssl
import stat
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis.asyncio
import redis.exceptions
from click.testing import CliRunner

from pipeline.cli import headrace
from pipeline.config.load import load_config, read_resolved, to_toml, write_resolved
from pipeline.data.tokenizer import load_text_tokenizer
from pipeline.ledger.redis.client import connect
from pipeline.ledger.server.embedded import EmbeddedServer
from pipeline.ledger.token import Token, write_token
from pipeline.ledger.url import hide_password, refuse_plaintext
from pipeline.observability.history import HISTORY_NAME
from pipeline.observability.report import write_report
from pipeline.preflight.checks import preflight
from pipeline.preflight.model_folder import read_model_config
from pipeline.supervisor.launchers.build import join_command
from pipeline.supervisor.run_folder import prepare_run_dir
from protocol.errors import ConfigError, DataError
from protocol.ids import Role
from tests.byte_tokenizer import write_byte_tokenizer
from tests.pipeline.op_config import op_config

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(
    path for folder in ("protocol", "pipeline", "workers", "ops") for path in (ROOT / folder).rglob("*.py")
)
UNPICKLERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "yaml.load",
    "yaml.unsafe_load",
    "torch.load",
    "os.system",
    "os.popen",
}
IMPORTERS = {
    "protocol/headrace.py",
    "pipeline/config/import_path.py",
    "pipeline/cli/__init__.py",
    "pipeline/files/columns.py",
    "pipeline/observability/sinks/__main__.py",
    "pipeline/observability/sinks/mlflow.py",
    "pipeline/observability/sinks/wandb.py",
    "pipeline/runtime/host_watch.py",
    "workers/__main__.py",
    "workers/preparation.py",
    "workers/code_check.py",
    "workers/engines/torch_build.py",
    "workers/starter.py",
    "ops/checks/fuzz.py",
}
"""Modules that import by name: the module on a process's command line, the configuration's
verifier or rule, and tables of our own. Sinks and the reader of GPUs import packages of
extras, and tables of columns import pyarrow late."""
RIVALS = {"ops/bench/ledger/rivals.py"}
"""The rivals of the benchmarks may pickle, among their own processes."""
SECRET = "correct-horse"


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def findings(source: str, name: str) -> list[str]:
    """Return the places in a source file that could run code that came with data."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [
            f"imports {module}" for module in modules if module.partition(".")[0] in UNPICKLERS and name not in RIVALS
        ]
        if not isinstance(node, ast.Call):
            continue
        called = dotted(node.func)
        given = {word.arg: word.value for word in node.keywords}
        if called in CALLS:
            found.append(f"calls {called}")
        if called.endswith("import_module") and name not in IMPORTERS:
            found.append("imports by name")
        if called.endswith((".load", ".loadtxt")) and "allow_pickle" in given:
            found.append("loads pickled arrays")
        for word in ("shell", "trust_remote_code", "allow_pickle"):
            value = given.get(word)
            if value is not None and not (isinstance(value, ast.Constant) and value.value is False):
                found.append(f"passes {word}")
    return found


def test_no_source_file_unpickles_or_runs_what_came_with_data() -> None:
    files = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in SOURCES}
    found = {name: findings(source, name) for name, source in files.items()}
    assert {name: places for name, places in found.items() if places} == {}
    assert len(found) > 600


@pytest.mark.parametrize(
    "line",
    ["import pickle", "from dill import loads", "eval(x)", "torch.load(p)", "np.load(p, allow_pickle=True)", "yaml.load(x)",
     "importlib.import_module(x)", "run(x, shell=True)", "AutoModel.from_pretrained(p, trust_remote_code=t)"],
)  # fmt: skip
def test_the_scan_finds_what_it_looks_for(line: str) -> None:
    assert findings(line, "some/file.py")


def test_a_model_of_pickled_weights_is_refused_unread(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(DataError, match="only pickled ones"):
        read_model_config(tmp_path)


def test_an_index_of_weights_cannot_lead_out_of_the_model_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    with pytest.raises(DataError, match="not a file of this folder"):
        read_model_config(tmp_path)


def test_code_beside_a_model_is_never_run(tmp_path: Path) -> None:
    import torch

    from workers.engines.model.loading import load_model

    folder = tmp_path / "model"
    shutil.copytree(ROOT / "ops" / "demo" / "tiny_model", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "planted",
        "auto_map": dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "planted.Planted"),
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "planted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    with pytest.raises(DataError):
        load_model(folder, torch.float32, torch.device("cpu"))
    assert not (tmp_path / "ran").exists()


URLS = [
    f"redis://:{SECRET}@127.0.0.1:1/0",
    f"rediss://user:{SECRET}@host/0?ssl_ca_certs=/x",
    f"unix://:{SECRET}@/run/s.sock",
    f"redis://127.0.0.1:1/0?password={SECRET}",
    f"redis://:{SECRET}@h1:1,h2:2/name",
]


@pytest.mark.parametrize("url", URLS)
def test_no_record_and_no_message_shows_the_ledgers_password(url: str, tmp_path: Path) -> None:
    config = op_config(tmp_path, f"ledger.url={url}")
    assert SECRET not in to_toml(config) + hide_password(f"error at {url}: refused")
    path = write_resolved(config, tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_resolved(tmp_path).ledger.url == hide_password(url)
    (tmp_path / HISTORY_NAME).touch()
    page = write_report(tmp_path, title="run", detail="<script>alert(1)</script>", audit=None).read_text()
    assert SECRET not in page
    assert "<script>alert" not in page
    for wrong in (f"ledger.urll={url}", f"ledger.max_memory_mb={url}", url):
        with pytest.raises(ConfigError) as caught:
            load_config([ROOT / "configs" / "demo.toml"], [wrong])
        assert SECRET not in str(caught.value)


PLAIN = [
    "://:{}@192.0.2.7:6379/0",
    "+sentinel://:{}@127.0.0.1,192.0.2.7:26379/ledger",
    "+cluster://:{}@127.0.0.1,192.0.2.7:6379/",
]


@pytest.mark.parametrize("rest", PLAIN)
def test_a_ledger_url_that_leaves_the_host_in_the_clear_is_refused(rest: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unencrypted over the network") as caught:
        preflight(op_config(tmp_path, f"ledger.url=redis{rest.format(SECRET)}"))
    assert SECRET not in str(caught.value)
    # encrypted, or not leaving it
    refuse_plaintext(f"rediss{rest.format(SECRET)}", "")
    refuse_plaintext(f"redis{rest.format(SECRET)}".replace("192.0.2.7", "[::1]"), "")
    refuse_plaintext(f"unix://:{SECRET}@/run/s.sock", "")


@pytest.mark.parametrize("rest", PLAIN)
def test_no_join_and_no_launched_worker_sends_a_token_in_the_clear(rest: str, tmp_path: Path) -> None:
    url = f"redis{rest.format(SECRET)}".replace(f":{SECRET}@", "")
    write_token(tmp_path / "r.token", Token(run="r", role=Role.REWARD, id="reward-1", secret=SECRET))
    done = CliRunner().invoke(
        headrace, ["fleet", "join", url, "--token", str(tmp_path / "r.token"), "--dir", str(tmp_path)]
    )
    assert "unencrypted over the network" in str(done.exception) and "--allow-plaintext" in str(done.exception)
    local = "ledger.url=redis://127.0.0.1:6379/0"
    for address in ([f"ledger.url={url}"], [local, f"launch.ledger_url={url}"]):
        config = op_config(tmp_path, "wire.transport=tcp", *address)
        with pytest.raises(ConfigError, match="unencrypted over the network"):
            join_command(config, tmp_path)
        config = op_config(tmp_path, "wire.transport=tcp", *address, "ledger.allow_plaintext=true")
        assert "--allow-plaintext" in join_command(config, tmp_path).words(Role.REWARD, "reward-0", "f")


def test_a_run_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    config = op_config(tmp_path)
    config.run_dir.mkdir(parents=True)
    config.run_dir.chmod(0o777)
    with pytest.raises(ConfigError, match="chmod 700"):
        prepare_run_dir(config, resume=False)


def test_a_run_folder_is_the_owners_alone(tmp_path: Path) -> None:
    folder = prepare_run_dir(op_config(tmp_path), resume=False)
    for path in (folder, *(inner for inner in folder.rglob("*") if inner.is_dir())):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_the_embedded_ledgers_password_is_in_two_private_files_and_in_no_arguments(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    server = EmbeddedServer(tmp_path, max_memory_mb=64)
    server.start()
    try:
        password = urlsplit(server.url).password or ""
        assert len(password) >= 32
        holding = [path for path in tmp_path.rglob("*") if path.is_file() and password.encode() in path.read_bytes()]
        assert sorted(str(path.relative_to(tmp_path)) for path in holding) == ["ledger.json", "ledger/server.conf"]
        assert {stat.S_IMODE(path.stat().st_mode) for path in holding} == {0o600}
        arguments = Path(f"/proc/{server.pid()}/cmdline")
        # elsewhere than on Linux nothing shows them as a file
        if arguments.exists():
            assert password.encode() not in arguments.read_bytes()
    finally:
        server.stop()


def test_a_chat_template_cannot_reach_the_interpreter(tmp_path: Path) -> None:
    for escape in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
    ):
        folder = write_byte_tokenizer(Path(tempfile.mkdtemp(dir=tmp_path)), escape)
        with pytest.raises(DataError):
            load_text_tokenizer(folder).render_chat([{"role": "user", "content": "x"}])


# -- TLS: the bundled server has none, so a proxy of Python's ssl ends it before the real server ---


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """Make a self-signed certificate for localhost; return it and its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    command = ["openssl", "req", "-x509", *curve, *subject, "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return cert, key


def pump(one: socket.socket, other: socket.socket) -> None:
    try:
        while data := one.recv(65536):
            other.sendall(data)
    except OSError:
        pass
    finally:
        for end in (one, other):
            end.close()


@contextmanager
def tls_proxy(unix_socket: str, cert: Path, key: Path) -> Iterator[int]:
    """Serve TLS on a port of the loopback interface before a server on a unix socket."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            try:
                client = context.wrap_socket(plain, server_side=True)
            except OSError:
                plain.close()
                continue
            server = socket.socket(socket.AF_UNIX)
            server.connect(unix_socket)
            for ends in ((client, server), (server, client)):
                threading.Thread(target=pump, args=ends, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


async def test_a_ledger_over_tls_is_reached_only_with_the_certificate_that_is_trusted(
    redis_server: str, tmp_path: Path
) -> None:
    cert, key = certificate(tmp_path, "ours")
    other, _ = certificate(tmp_path, "other")
    with tls_proxy(redis_server.removeprefix("unix://"), cert, key) as port:
        good = connect(f"rediss://localhost:{port}/0?ssl_ca_certs={cert}")
        assert await good.ping()
        await good.aclose()
        for url in (
            # not signed by a trusted authority
            f"rediss://localhost:{port}/0?ssl_ca_certs={other}",
            f"rediss://localhost:{port}/0",
            # a certificate of another name
            f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={cert}",
        ):
            client = connect(url, patience_s=1.0)
            with pytest.raises(redis.exceptions.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
                await client.ping()
            await client.aclose()
