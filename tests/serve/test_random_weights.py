"""`muse-fn serve --random-weights`: sizes without a checkpoint, served alone and on a mesh, and under load."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from muse_fn.params.config import Config
from muse_fn.serve.__main__ import main
from muse_fn.serve.options import EMBEDDED
from muse_fn.tokenizer import load_tokenizer
from tests.serve.commanded import PATIENCE, chat, commanded
from tests.tiny_checkpoint import TINY

WIDE = replace(TINY, vocab_size=2048, heads=8, expert_size=64, max_positions=2048)
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
SMALL = ("--random-weights", "--port", "0", "--cache-gib", "0.05")
NOISE = "every answer is noise"
Command = Callable[..., tuple[int, str, str]]


def written(folder: Path, config: Config = WIDE, files: tuple[str, ...] = TOKENIZER) -> Path:
    """A folder with a config, the embedded model's tokenizer, and a file of weights that cannot be read."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_json()))
    (folder / "model.safetensors").write_bytes(b"no weights at all")
    for file in files:
        shutil.copy(EMBEDDED / file, folder)
    return folder


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command in this process: exit code, output, errors."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["muse-fn", *words])
        with pytest.raises(SystemExit) as end:
            main()
        shown = capsys.readouterr()
        return end.value.code if isinstance(end.value.code, int) else 0, shown.out, " ".join(shown.err.split())

    return run


def completed(url: str, **body: Any) -> dict[str, Any]:
    """The ids of a continuation and how it ended."""
    asked = {"prompt": "word", "ignore_eos": True, "return_token_ids": True, "temperature": 1.0, **body}
    response = httpx.post(f"{url}/v1/completions", json=asked, timeout=PATIENCE)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


@pytest.mark.parametrize("more", [(), ("--mesh", "tp=2"), ("--quantize", "none", "--mesh", "pp=2,tp=1")], ids=str)
def test_it_serves_noise_of_known_tokens_and_says_so(tmp_path: Path, more: tuple[str, ...], command: Command) -> None:
    folder, tokenizer = written(tmp_path / "big"), load_tokenizer(EMBEDDED)
    with commanded(*SMALL, "--model", str(folder), *more) as server:
        url = server.address()
        said = [line for line in server.said if NOISE in line]
        assert len(said) == 1, server.text
        assert " WARNING " in said[0]
        (card,) = httpx.get(f"{url}/v1/models", timeout=PATIENCE).json()["data"]
        assert card["id"] == "big-random"
        answer = completed(url, max_tokens=80, seed=1)
        assert answer["finish_reason"] == "length"
        assert len(ids := answer["token_ids"]) == 80
        assert len(set(ids)) > 40, "noise"
        assert all(token < len(tokenizer) and tokenizer.bytes_of[token] is not None for token in ids)
        assert completed(url, max_tokens=80, seed=1)["token_ids"] == ids
        assert chat(url, max_tokens=7, ignore_eos=True)["usage"]["completion_tokens"] == 7

        fields = '{"temperature": 1.0, "ignore_eos": true}'
        load = ("--concurrency", "4", "--requests", "8", "--max-tokens", "16", "--prompt-tokens", "40", "--json")
        code, out, _ = command("bench", "serve", "--url", url, *load, "--api", "completions", "--fields", fields)
        assert code == 0
        (level,) = json.loads(out)["levels"]
        assert (level["ok"], level["failed"], level["output_tokens"]) == (8, {}, 8 * 16)
        assert level["prompt_tokens"] > 8 * 40
        assert level["first_token"]["p50"] < level["whole"]["p50"]
        assert level["between_tokens"]["p50"] > 0


def test_a_folder_without_a_tokenizer_takes_ids(tmp_path: Path) -> None:
    folder = written(tmp_path, files=())
    with commanded(*SMALL, "--model", str(folder), "--name", "given") as server:
        url = server.address()
        assert "given-random on http" in server.text
        body = {"token_ids": [1, 2, 3], "max_tokens": 9, "ignore_eos": True}
        answer = httpx.post(f"{url}/generate", json=body, timeout=PATIENCE).json()["choices"][0]
        assert len(answer["token_ids"]) == 9
        assert all(0 <= token < WIDE.vocab_size for token in answer["token_ids"])


@pytest.mark.parametrize("mesh", [(), ("--mesh", "tp=2")], ids=str)
@pytest.mark.parametrize(
    ("config", "told"),
    [
        (None, "config.json: cannot be read"),
        (replace(WIDE, expert_size=48), "mxfp4 needs a multiple of 32 inputs: layers.*.mlp.experts.down has 48 inputs"),
        (replace(WIDE, initializer_range=0.0), "initializer_range is 0.0: random weights need"),
    ],
)
def test_what_cannot_be_made_is_one_sentence(
    tmp_path: Path, config: Config | None, told: str, mesh: tuple[str, ...], command: Command
) -> None:
    folder = written(tmp_path, config or WIDE)
    if config is None:
        (folder / "config.json").unlink()
    code, _, said = command("serve", *SMALL, "--model", str(folder), *mesh)
    assert code == 1
    assert said.count("error: ") == 1
    assert told in said
    assert "Traceback" not in said


def test_a_mesh_that_does_not_fit_is_refused_before_a_rank_starts(tmp_path: Path, command: Command) -> None:
    code, _, said = command("serve", *SMALL, "--model", str(written(tmp_path)), "--mesh", "tp=4")
    assert code == 1
    assert "error: mesh ep=1,tp=4 does not fit this model: tp is 4: 16 inputs of layers.1.mlp.experts.down" in said
