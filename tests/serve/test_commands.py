"""The command line: what it prints, what it refuses, and that JSON output is JSON and nothing else."""

import io
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import muse_fn
from muse_fn.params.inventory import inventory
from muse_fn.serve.__main__ import main
from muse_fn.tokenizer import load_tokenizer
from tests.toy_tokenizer import build

TEMPLATE = (Path(muse_fn.__file__).parent / "nano" / "chat_template.jinja").read_text()


class Run(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Shell:
    """Runs `muse-fn` in this process."""

    def __init__(self, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str], model: Path) -> None:
        self.patch, self.capture, self.model = patch, capture, model

    def __call__(self, *words: str, stdin: str = "", own_model: bool = True) -> Run:
        given = ["muse-fn", *words, *(["--model", str(self.model)] if own_model else [])]
        self.patch.setattr(sys, "argv", given)
        self.patch.setattr(sys, "stdin", io.StringIO(stdin))
        self.capture.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        found = self.capture.readouterr()
        code = end.value.code
        return Run(code if isinstance(code, int) else 0, found.out, found.err)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with random weights and a toy tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoints") / "random"
    tokenizer = build(tmp_path_factory.mktemp("tokenizer"), template=TEMPLATE)
    config = muse_fn.Config(
        vocab_size=len(load_tokenizer(tokenizer)) + 3,
        hidden_size=32,
        layers=3,
        heads=4,
        kv_heads=2,
        head_dim=8,
        latent_size=32,
        expert_size=32,
        experts=4,
        top_k=2,
        window=8,
        max_positions=900,
        initializer_range=0.3,
        eos_token_id=(),
    )
    muse_fn.save(folder, muse_fn.init_params(config), config, format="quark-mxfp4")
    for file in tokenizer.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path) -> Shell:
    return Shell(monkeypatch, capsys, model)


def test_score_of_ids_is_the_forward_pass(shell: Shell, model: Path) -> None:
    opened = muse_fn.load(model)
    logp = muse_fn.forward(opened.params, torch.tensor([[1, 2, 3]]), opened.config).log_softmax(-1)
    found = shell("score", "--ids", "[1,2,3]", "--json")
    assert (found.code, found.err) == (0, "")
    assert found.json.keys() == {"logprobs"}
    assert found.json["logprobs"][0] is None
    assert found.json["logprobs"][1:] == pytest.approx([logp[0, 0, 2].item(), logp[0, 1, 3].item()], abs=1e-5)


def test_score_of_a_text_tells_its_ids(shell: Shell) -> None:
    found = shell("score", "a <|eot|> b", "--json")
    assert len(found.json["ids"]) == len(found.json["logprobs"]) > 3
    table = shell("score", "a b")
    assert "perplexity" in table.out
    assert "Built with Muse Spark Open" in table.err


def test_generate_prints_json_lines_in_order(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    lines: list[dict[str, Any]] = [
        {"prompt": "hi"},
        {"ids": [1, 2, 3]},
        {"messages": [{"role": "user", "content": "x"}], "reasoning_effort": "low"},
        {"prompt": "hi"},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    found = shell("generate", "--file", str(file), "--max-new-tokens", "5", "--batch", "3")
    rows = [json.loads(line) for line in found.out.splitlines()]
    assert [row["index"] for row in rows] == [0, 1, 2, 3]
    assert rows[0]["tokens"] == rows[3]["tokens"]
    assert len(rows[1]["tokens"]) == 5
    assert {"content", "reasoning", "tool_calls", "text", "tokens", "finish"} <= rows[0].keys()
    written = tmp_path / "out.jsonl"
    assert shell("generate", "--file", str(file), "--max-new-tokens", "5", "--output", str(written)).out == ""
    assert [json.loads(line) for line in written.read_text().splitlines()] == rows


def test_generate_raw_continues_the_text_itself(shell: Shell, model: Path) -> None:
    opened = muse_fn.load(model)
    assert opened.tokenizer
    ids = opened.tokenizer.encode("one two")
    expected = muse_fn.generate(opened, [ids], muse_fn.Settings(max_new_tokens=4))[0].tokens
    found = shell("generate", "--raw", "one two", "--max-new-tokens", "4", "--json")
    assert found.json["tokens"] == list(expected)


def test_the_same_seed_gives_the_same_answer(shell: Shell) -> None:
    words = ("generate", "hi", "--json", "--max-new-tokens", "12", "--temperature", "1", "--seed")
    first, again, other = (shell(*words, seed).json["tokens"] for seed in ("1", "1", "2"))
    assert first == again != other


def test_chat_keeps_a_history_and_leaves(shell: Shell) -> None:
    found = shell("chat", "--max-new-tokens", "4", stdin="hello\n/help\n/new\n/effort nonsense\nhello\n/quit\nnever\n")
    assert found.code == 0
    assert "reasoning_effort must be one of" in found.err
    assert "Built with Muse Spark Open" in found.err


def test_inspect_of_the_released_config_shows_the_published_counts(shell: Shell) -> None:
    found = shell("inspect", "--config", "released", own_model=False)
    published = (
        *("816,680,197,632", "42,780,777,984", "13,172,261,120", "12,884,901,888", "798,863,917,056"),
        *("13,522,436,096", "4,160,749,568", "130,039,296", "3,310,354,432", "819,990,552,064"),
        *("117,832,192", "822,036,521,472", "690,012,416", "201,326,592", "16,777,216", "67,108,864", "2,097,152"),
    )
    assert [number for number in published if number not in found.out] == []
    sizes = shell("inspect", "--config", "released", "--json", own_model=False).json["bytes"]
    assert {name: round(size / 1e9) for name, size in sizes.items()} == {"bf16": 1644, "quark-mxfp4": 509, "nvfp4": 533}


def test_inspect_needs_no_weights_but_verifies_them_if_there(shell: Shell, model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    only_config = shell("inspect", "--json", "--model", str(tmp_path), own_model=False).json
    assert only_config["stored"] is None
    found = shell("inspect", "--json").json
    assert {line["format"] for line in found["stored"]} == {"plain", "quark MXFP4"}
    size = sum(line["bytes"] for line in found["stored"])
    assert size == inventory(muse_fn.Config.from_json(model)).bytes["quark-mxfp4"]
    (tmp_path / "model.safetensors").write_bytes(b"")
    broken = shell("inspect", "--model", str(tmp_path), own_model=False)
    assert broken.code == 1
    assert "model.safetensors" in broken.err


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("score",), 1, "a text or --ids"),
        (("score", "x", "--ids", "[1]"), 1, "exactly one"),
        (("score", "--ids", "[1,"), 1, "not JSON"),
        (("score", "--ids", "[true]"), 1, "whole numbers"),
        (("score", "--ids", "[" * 100_000), 1, "not JSON"),
        (("score", "--ids", "[1]", "--device", "meta"), 1, "--device meta"),
        (("score", "--ids", "[99999]"), 1, "id 99999 at 0"),
        (("score", "--ids", "[]"), 1, "empty"),
        (("score", "--ids", "[1]", "--device", "nowhere"), 1, "--device nowhere"),
        (("generate",), 1, "nothing to answer"),
        (("generate", "x", "--temperature", "-1"), 1, "temperature is -1"),
        (("generate", "x", "--top-p", "0"), 1, "top_p is 0"),
        (("generate", "x", "--max-new-tokens", "0"), 2, "max-new-tokens"),
        (("generate", "x", "y", "--max-new-tokens", "5000"), 1, "prompt 1 has"),
        (("generate", "x", "--max-new-tokens", "5000"), 1, "limit is 900"),
        (("generate", "x", "--effort", "huge"), 1, "reasoning_effort"),
        (("generate", "x", "--dtype", "int8"), 2, "dtype"),
        (("generate", "x", "--bogus"), 2, "--bogus"),
        (("inspect", "--config", "/nowhere/config.json"), 1, "/nowhere/config.json"),
        (("nonsense",), 2, "nonsense"),
    ],
)
def test_what_cannot_be_done_is_said(shell: Shell, words: tuple[str, ...], code: int, told: str) -> None:
    found = shell(*words, own_model=words[0] not in ("inspect", "nonsense"))
    assert found.code == code
    assert told in found.err
    assert "Traceback" not in found.err
    assert found.out == ""


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("[1]", "line 2: must be a JSON object"),
        ("{", "line 2: not JSON"),
        ('{"promt": "x"}', "line 2: has promt"),
        ('{"prompt": "x", "ids": [1]}', "line 2"),
        ('{"prompt": 3}', "prompt 1: prompt must be a string"),
        ('{"ids": ["a"]}', "prompt 1: ids"),
        ('{"messages": []}', "prompt 1: messages"),
        ('{"messages": null}', "prompt 1: messages"),
        ("[" * 100_000, "line 2: not JSON"),
        ('{"ids": [99999]}', "prompt 1 has id 99999"),
        ('{"messages": [{"role": "wizard", "content": "x"}]}', "prompt 1: messages[0].role"),
    ],
)
def test_a_bad_line_of_a_file_is_named(shell: Shell, tmp_path: Path, line: str, told: str) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(f'{{"prompt": "x"}}\n{line}\n')
    found = shell("generate", "--file", str(file), "--max-new-tokens", "2")
    assert (found.code, found.out) == (1, "")
    assert told in found.err


@pytest.mark.parametrize("command", ["generate", "chat", "score", "inspect"])
def test_every_command_has_help(shell: Shell, command: str) -> None:
    found = shell(command, "--help", own_model=False)
    assert found.code == 0
    assert "--model" in found.out


def test_lines_end_at_newlines_only_and_text_is_shown_as_it_is(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('\ufeff{"prompt": "a\u2028b"}\r\n', encoding="utf-8")
    found = shell("generate", "--file", str(file), "--max-new-tokens", "2")
    assert (found.code, len(found.out.splitlines())) == (0, 1)
    assert "> I say :heart: [b]" in shell("generate", "I say :heart: [b]", "--max-new-tokens", "2").out


def test_an_answer_fills_what_is_left_when_nothing_was_asked(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps({"ids": [1] * 897}))
    assert len(shell("generate", "--file", str(file)).json["tokens"]) <= 3
