"""The command `muse-fn serve`: its options, its files, its keys, and what it says when it cannot begin."""

import json
import shutil
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from muse_fn.serve.__main__ import app, main
from muse_fn.serve.config_file import KINDS, _kinds, _take  # pyright: ignore[reportPrivateUsage]
from tests.serve.commanded import PATIENCE, chat, commanded, status_of, text_of

SMALL = ("--port", "0", "--cache-gib", "0.05")


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command in this process, where it must end before it serves; what it says."""

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["muse-fn", "serve", *words])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 1
        said = capsys.readouterr().err
        assert said.count("error: ") == 1
        assert "Traceback" not in said
        return " ".join(said.split())

    return run


def written(folder: Path, text: str) -> str:
    file = folder / "options.toml"
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("prot = 1", "has prot: known are allowed_host, api_key, "),
        ('port = "80"', "port is a string: must be a whole number"),
        ("rows = true", "rows is true: must be a whole number"),
        ("rows = 1.5", "rows is 1.5: must be a whole number"),
        ("share = false", "share is false: must be a number"),
        ('cors-origin = "http://a"', "cors_origin is a string: must be a list of strings"),
        ('api_key = ["a", 3]', "api_key is a list: must be a list of strings"),
        ("log_json = 1", "log_json is 1: must be true or false"),
        ("host = 5", "host is 5: must be a string"),
        ("port = 1979-05-27", "port is a date or a time: must be a whole number"),
        ("[port]", "port is a table: must be a whole number"),
        ("config = 'x'", "has config"),
        ("port = [", "cannot be read as TOML"),
        ("port = 1\nport = 2", "cannot be read as TOML"),
        ("port = 'x'\nrows = true\nprot = 1", "port is a string: must be a whole number; rows is true: must be a "),
    ],
)
def test_a_wrong_line_of_the_file_is_named_with_the_file(refused: Any, tmp_path: Path, text: str, told: str) -> None:
    file = written(tmp_path, text)
    said = refused("--config", file)
    assert f"error: --config {file}: " in said
    assert told in said


def test_no_such_file_and_no_text_at_all(refused: Any, tmp_path: Path) -> None:
    assert "cannot be read as TOML" in refused("--config", str(tmp_path / "none.toml"))
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    assert "cannot be read as TOML" in refused("--config", str(tmp_path / "bytes.toml"))


def a_context() -> typer.Context:
    command = cast(Any, typer.main.get_command(app)).commands["serve"]
    return cast(typer.Context, SimpleNamespace(command=command, default_map=None))


VALUES = st.one_of(st.booleans(), st.integers(0, 9), st.floats(0, 1), st.text("ab", max_size=3), st.lists(st.just("a")))


@given(st.dictionaries(st.sampled_from(sorted(_kinds(a_context()))), VALUES, max_size=4))
def test_a_file_is_taken_exactly_if_every_value_is_of_its_options_kind(
    tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any]
) -> None:
    context, path = a_context(), tmp_path_factory.mktemp("config") / "o.toml"
    path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items()))
    kinds = _kinds(context)
    wrong = {name for name, value in options.items() if not kinds[name].fits(value)}
    if not wrong:
        _take(context, path)
        assert context.default_map == options
        return
    with pytest.raises(ValueError, match=r"^--config .*o\.toml: ") as refused:
        _take(context, path)
    assert all(f"{name} is " in str(refused.value) for name in wrong)


def test_every_option_has_the_kind_of_its_annotation() -> None:
    kinds = _kinds(a_context())
    assert {name for name, kind in kinds.items() if kind is KINDS[bool]} >= {"strict", "log_json", "deterministic"}
    assert kinds["port"] is kinds["queue"] is KINDS[int]
    assert kinds["cache_gib"] is kinds["share"] is kinds["drain"] is KINDS[float]
    assert kinds["api_key"].types == (list,)
    assert kinds["model"].types == kinds["dtype"].types == kinds["kv"].types == (str,)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--cache-gib", "0"), "--cache-gib 0.0: must be at least 0.0"),
        (("--cache-gib", "1e6"), "--cache-gib 1000000.0: must be at most the memory of this machine, which is "),
        (("--api-key", ""), "--api-key: must not be empty"),
        (("--api-key", "a", "--api-key", " , "), "--api-key: must not be empty"),
        (("--tls-cert", "a.pem"), "--tls-cert and --tls-key: both or neither must be given"),
        (("--capture", "--deterministic"), "--capture and --deterministic: only one can be had"),
        (("--tls-cert", "/none.pem", "--tls-key", "/none.pem"), "--tls-cert /none.pem --tls-key /none.pem: must be a"),
        (("--log-level", "loud"), "--log-level loud: must be one of debug, info, warning, error"),
        (("--host", "nowhere.invalid"), "--host nowhere.invalid --port 0: cannot be listened on"),
        (("--model", "/nowhere"), "/nowhere: this checkpoint cannot be used"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(refused: Any, words: tuple[str, ...], told: str) -> None:
    assert told in refused("--port", "0", *words)


def test_a_port_in_use_is_one_line(refused: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        said = refused("--port", port)
    assert f"error: --host 127.0.0.1 --port {port}: cannot be listened on (" in said


def test_the_command_line_goes_before_the_file_and_keys_come_from_everywhere(tmp_path: Path) -> None:
    file = written(tmp_path, 'name = "of-the-file"\nport = 1\ndrain = 1\nstrict = true\nlog_json = true\n')
    with commanded(*SMALL, "--config", file, environment={"MUSE_FN_API_KEY": "first second,third"}) as command:
        url = command.address()
        assert url.rpartition(":")[2] != "1"
        assert "of-the-file" in command.text
        assert "(with a key)" in command.text
        assert (status_of(f"{url}/health"), status_of(f"{url}/ready"), status_of(f"{url}/v1/models")) == (200, 200, 401)
        for key in ("first", "second", "third"):
            headers = {"authorization": f"Bearer {key}"}
            listed = httpx.get(f"{url}/v1/models", headers=headers, timeout=PATIENCE)
            assert listed.json()["data"][0]["id"] == "of-the-file"
        body = {"messages": [{"role": "user", "content": "hi"}], "nonsense": 1}
        strict = httpx.post(f"{url}/v1/chat/completions", json=body, headers={"x-api-key": "third"}, timeout=PATIENCE)
        assert (strict.status_code, strict.json()["error"]["param"]) == (400, "nonsense")
        command.process.terminate()
        assert command.ends() == 0
        assert "draining" in [json.loads(line)["message"] for line in command.said if line.startswith("{")]


def test_encrypted_connections(tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl here to make a certificate with")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*made, *names, "-keyout", key, "-out", cert], check=True, capture_output=True, timeout=PATIENCE)
    with commanded(*SMALL, "--tls-cert", str(cert), "--tls-key", str(key), "--deterministic") as command:
        url = command.address()
        assert url.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(cert))
        with httpx.Client(verify=trusting, timeout=PATIENCE) as session:
            body = {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "temperature": 0}
            answer = session.post(f"{url}/v1/chat/completions", json=body).json()
        assert "7" in text_of(answer)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", timeout=PATIENCE)
        command.process.terminate()
        assert command.ends() == 0


def test_a_cache_that_holds_little_says_so_in_every_refusal() -> None:
    """The longest sequence is what the cache holds, not what the model could."""
    with commanded("--port", "0", "--cache-gib", "0.0008", "--chunk", "32") as command:
        url = command.address()
        limit = httpx.get(f"{url}/v1/models", timeout=PATIENCE).json()["data"][0]["max_model_len"]
        assert 2 <= limit < 2048
        assert "7" in text_of(chat(url))
        asked = {"prompt": [5] * 10, "max_tokens": limit - 9}
        refused = httpx.post(f"{url}/v1/completions", json=asked, timeout=PATIENCE)
        assert refused.status_code == 400
        assert str(limit) in refused.json()["error"]["message"]
        asked = {"prompt": [5] * 10, "max_tokens": limit - 10, "ignore_eos": True}
        found = httpx.post(f"{url}/v1/completions", json=asked, timeout=PATIENCE).json()
        assert found["usage"]["completion_tokens"] == limit - 10
        command.process.terminate()
        assert command.ends() == 0
