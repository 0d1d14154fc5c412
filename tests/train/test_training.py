"""The training programs: data as a function of a seed, the forms with gradients, a loss that falls, the command."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import cast

import pytest
import torch
from torch import Tensor

from muse_fn.kernels import reference
from muse_fn.kernels.packed import dequantise, quantise_mxfp4
from muse_fn.params.tree import named
from train.data import Batch, Codec, batch, codec_of, conversation, document, messages
from train.model import NANO, Pace, every_expert, is_packed, start, stepper, stored, training_ops

ROOT = Path(__file__).parent.parent.parent
SMALL = replace(
    NANO,
    hidden_size=64,
    layers=3,
    head_dim=16,
    latent_size=32,
    expert_size=32,
    layer_types=(),
    layer_rope_theta=(),
    mlp_layer_types=(),
)


@pytest.fixture(scope="module")
def code() -> Codec:
    return codec_of()


def test_a_batch_is_a_function_of_seed_and_number(code: Codec) -> None:
    one, same, other = (batch(seed, 3, 2, 256, code) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one.tokens, other.tokens)


def test_what_is_learned_is_what_the_assistant_writes(code: Codec) -> None:
    rng = Random(0)
    for _ in range(50):
        ids, mask = document(rng, code, 1024)
        spelled = code.tokenizer.decode(
            [i for i, kept in zip(ids, mask, strict=True) if kept], skip_special_tokens=False
        )
        turns = spelled.split("<|eot|>")
        assert turns.pop() == ""
        assert turns
        assert all(turn.startswith(" to=self<|message|>") for turn in turns)
        assert "<|start|>user" not in spelled


def test_text_survives_the_tokenizer(code: Codec) -> None:
    rng = Random(1)
    for _ in range(50):
        talked = conversation(rng)
        text = code.text(talked, messages(talked))
        assert code.tokenizer.decode(code.ids(text), skip_special_tokens=False) == text


def test_every_expert_is_the_reference_with_gradients() -> None:
    draw = torch.Generator().manual_seed(0)
    u, gate_up, down = (
        torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True)
        for shape in ((6, 8), (4, 24, 8), (4, 8, 12))
    )
    idx = torch.randint(4, (6, 2), generator=draw)
    outs = [form(u, idx, gate_up, down) for form in (every_expert, reference.expert_rows)]
    torch.testing.assert_close(*outs)
    mine, theirs = (torch.autograd.grad(out.square().sum(), (u, gate_up, down)) for out in outs)
    torch.testing.assert_close(mine, theirs)


def test_the_experts_of_a_training_step_have_the_contract_of_the_reference() -> None:
    loads: list[Tensor] = []
    ops = training_ops(torch.zeros(1, 6, dtype=torch.int64), loads)
    draw = torch.Generator().manual_seed(0)
    shapes = (6, 8), (4, 24, 8), (4, 8, 12)
    u, gate_up, down = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
    idx = 3 + torch.randint(4, (6, 2), generator=draw)
    found = ops.expert_rows(u, idx, gate_up, down, first=3, dtype=torch.float32, arranged=())
    torch.testing.assert_close(found, reference.expert_rows(u, idx, gate_up, down, first=3, dtype=torch.float32))
    (load,) = loads
    assert load.tolist() == torch.bincount(idx.flatten() - 3, minlength=4).tolist()


def test_packed_leaves_are_seen_as_the_checkpoint_keeps_them() -> None:
    values = start(SMALL, 0, "cpu").values
    seen = cast("dict[str, Tensor]", named(stored(values, SMALL, torch.float32, packed=True)))
    packed = {path for path in values if is_packed(path, SMALL)}
    assert packed == {"layers.1.mlp.experts.gate_up", "layers.1.mlp.experts.down"}
    for path, value in values.items():
        want = dequantise(quantise_mxfp4(value), torch.float32) if path in packed else value
        assert torch.equal(seen[path], want)


def test_the_loss_falls_and_repeats_itself(code: Codec) -> None:
    rows = batch(0, 0, 1, 256, code)
    losses = [_losses(rows) for _ in range(2)]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0] - 0.5


def _losses(rows: Batch) -> list[float]:
    step, state, found = stepper(SMALL, compiled=False), start(SMALL, 0, "cpu"), list[float]()
    for number in range(5):
        pace = Pace(torch.tensor(3e-3), torch.tensor(1e-3), torch.tensor(float(number + 1)))
        state, loss, aux = step(state, stored(state.values, SMALL, torch.float32, packed=number > 2), rows, pace)
        assert aux.loads.sum() == SMALL.layers * rows.tokens.numel() * SMALL.top_k
        found.append(loss.item())
    return found


def test_the_command_trains_and_writes(tmp_path: Path) -> None:
    words = "--steps 3 --rows 1 --length 128 --every 1 --count 0 --out".split()
    command = [sys.executable, "-m", "train.nano", *words, str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    log = (tmp_path / "nano.log").read_text()
    losses = [float(line.split("loss")[1].split()[0]) for line in log.splitlines() if "loss" in line]
    assert losses[-1] < losses[0]
    assert (tmp_path / "trained.safetensors").stat().st_size > 15_000_000
