"""The public names: exactly these, with these arguments, and they do together what the documents say."""

import ast
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import muse_fn
from tests.models import SMALL, close, random_params, random_tokens

ROOT = Path(__file__).parent.parent

NAMES = {
    "Config": "the architecture",
    "KVCache": "the cache",
    "Mesh": "the ranks, and which one this is",
    "Model": "config, params, tokenizer",
    "Params": "the tree",
    "Sampling": "how a token is drawn",
    "Settings": "how a text is generated",
    "View": "where a step reads and writes",
    "advance": "View -> the next step's",
    "decode": "one step",
    "expert_load": "which experts tokens go to",
    "forward": "all logits",
    "generate": "prompts -> tokens",
    "init_cache": "an empty cache",
    "init_params": "a random tree",
    "join": "this process's rank of a mesh",
    "leave": "the end of that",
    "load": "folder -> Model",
    "own_blocks": "a simple table",
    "prefill": "a chunk of prompts",
    "save": "tree -> folder",
    "score": "log-probabilities",
    "shard": "tree -> a rank's tree",
    "simulate": "all ranks in this process",
    "unshard": "ranks' trees -> tree",
}

# Fixed by the design: programs outside of this repository call these so. More arguments may follow.
CALLS = {
    "load": "path, device='cpu', dtype=torch.float32, mesh=None",
    "forward": "params, tokens, config, mesh=None",
    "init_params": "config, seed=0, dtype=torch.float32",
    "save": "path, params, config, format='bf16'",
    "init_cache": "config, num_blocks, block_size=16",
    "prefill": "params, tokens, kv, view, config",
    "decode": "params, tokens, kv, view, config",
}


def test_public_names_are_exactly_these() -> None:
    public = {n for n, v in vars(muse_fn).items() if not n.startswith("_") and not isinstance(v, ModuleType)}
    assert muse_fn.__all__ == sorted(NAMES)
    assert public == set(NAMES)


def test_every_public_name_is_re_exported_as_itself() -> None:
    """`import x as x`: type checkers take that, and only that, for a public name."""
    page = ast.parse((ROOT / "muse_fn" / "__init__.py").read_text(encoding="utf-8"))
    imported = [alias for node in page.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert [(alias.name, alias.asname) for alias in imported if alias.name != alias.asname] == []
    assert {alias.name for alias in imported} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_documented(name: str) -> None:
    doc = inspect.getdoc(getattr(muse_fn, name))
    assert doc
    assert not re.match(rf"{name}\(", doc), "a docstring of its own, not the one a NamedTuple or dataclass makes up"


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_as_the_design_fixes_them(name: str) -> None:
    shown: list[str] = []
    for parameter in inspect.signature(getattr(muse_fn, name)).parameters.values():
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            plain = parameter.default is parameter.empty
            shown.append(parameter.name if plain else f"{parameter.name}={parameter.default!r}")
    wanted = CALLS[name].split(", ")
    assert shown[: len(wanted)] == wanted


def test_a_model_is_three_things() -> None:
    assert muse_fn.Model._fields == ("config", "params", "tokenizer")


@pytest.mark.parametrize("format", ["bf16", "float32"])
def test_the_public_names_do_together_what_the_design_says(format: str, tmp_path: Path) -> None:
    """init, save, load, forward; then the same logits through a cache, in a prefill and a decode step."""
    config = muse_fn.Config.from_json(SMALL.to_json())
    assert config == SMALL
    shape = muse_fn.init_params(config, seed=0, dtype=torch.float32)
    params = random_params(config, 0, torch.bfloat16 if format == "bf16" else torch.float32)
    assert [type(x) for x in params] == [type(x) for x in shape]
    muse_fn.save(tmp_path, params, config, format=format)
    model = muse_fn.load(tmp_path, device="cpu", dtype=torch.float32, mesh=None)
    assert model.config == config
    assert model.tokenizer is None

    tokens = random_tokens(config, 1, 2, 10)
    with torch.no_grad():
        logits = muse_fn.forward(model.params, tokens, model.config, mesh=None)
        close(logits, muse_fn.forward(params, tokens, config), 1e-5 if format == "float32" else 0.1)
        assert logits.dtype == torch.float32
        assert logits.shape == (2, 10, config.vocab_size)
        table = muse_fn.own_blocks(config, 2, 10, 4)
        kv = muse_fn.init_cache(config, num_blocks=1 + table.numel(), block_size=4)
        view = muse_fn.View(table, torch.tensor([0, 0]), torch.tensor([9, 9]))
        last, kv = muse_fn.prefill(model.params, tokens[:, :9], kv, view, config)
        close(last, logits[:, 8])
        step, kv = muse_fn.decode(model.params, tokens[:, 9:], kv, muse_fn.advance(view), config)
        close(step, logits[:, 9:])


def test_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Python, block after block in one namespace, from the root of the repository."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks: list[str] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block.replace("/tmp/", f"{tmp_path}/"), names)  # paths the README writes to
