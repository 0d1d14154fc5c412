"""Whole steps in bfloat16 with compiled forms: near the plain ones, a row's bits its own, captured as they are."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from muse_fn.buckets import Bucket
from muse_fn.captured_decode import Arenas, capture_decode, decode_and_sample
from muse_fn.kernels import cpu_ops
from muse_fn.kernels.select import EAGER, REFERENCE, Ops
from muse_fn.kvcache.cache import KVCache, View
from muse_fn.params.quantise import quantise_experts
from muse_fn.params.tree import Params, map_tensors
from muse_fn.sample import Sampling, draws
from muse_fn.step import decode, prefill
from tests.models import SMALL, copied, on_arrays, random_params, random_tokens, scattered_cache

pytest.importorskip("numba", reason="Numba is not installed")
BF16 = torch.bfloat16
CONFIG = replace(SMALL, hidden_size=64, intermediate_size=96, head_dim=32, latent_size=32, expert_size=64, window=8)
LENGTHS = [9, 3, 6]


def begun(params: Params) -> tuple[Tensor, KVCache, View]:
    """The last token of each prompt, a cache with what precedes it, and the view of the step that reads it."""
    kv, table = scattered_cache(CONFIG, len(LENGTHS), 16, 4, 0)
    kv = on_arrays(lambda t: t.to(BF16), kv)
    tokens, past = random_tokens(CONFIG, 0, len(LENGTHS), max(LENGTHS)), torch.tensor(LENGTHS) - 1
    with torch.no_grad():
        _, kv = prefill(params, tokens, kv, View(table, past * 0, past), CONFIG, all_logits=True, ops=EAGER)
    return tokens.gather(1, past[:, None]), kv, View(table, past, torch.ones_like(past))


@pytest.fixture(scope="module", params=["bf16", "mxfp4"])
def params(request: pytest.FixtureRequest) -> Params:
    plain = random_params(CONFIG, 0, BF16)
    return plain if request.param == "bf16" else quantise_experts(plain, CONFIG)


def logits(params: Params, ops: Ops | None = None) -> Tensor:
    token, kv, view = begun(params)
    with torch.no_grad():
        return decode(params, token, kv, view, CONFIG, ops=ops)[0]


def test_a_step_is_as_near_to_float32_as_a_plain_one(params: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    file = cpu_ops.file_of
    monkeypatch.setattr(cpu_ops, "file_of", lambda name: (names.append(name), file(name))[1])  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    found = logits(params)
    assert {*names} == {"cpu_linear", "cpu_rows", "cpu_heads", "cpu_attention", "cpu_experts"}
    exact = logits(map_tensors(lambda t: t.float() if t.dtype == BF16 else t, params), REFERENCE)
    plain = logits(params, EAGER)
    errors = [(x - exact).pow(2).mean().sqrt().item() for x in (found, plain)]
    assert errors[0] <= 1.25 * errors[1]
    assert errors[1] < 0.2 * exact.pow(2).mean().sqrt().item()


def test_a_row_of_a_step_has_the_bits_that_it_has_alone(params: Params) -> None:
    token, kv, view = begun(params)
    with torch.no_grad():
        whole, _ = decode(params, token, copied(kv), view, CONFIG)
        for n in range(len(LENGTHS)):
            own = View(view.table_GBN[:, n : n + 1], view.past_B[n : n + 1], view.count_B[n : n + 1])
            alone, _ = decode(params, token[n : n + 1], copied(kv), own, CONFIG)
            assert torch.equal(alone[0], whole[n])


def test_captured_steps_are_the_eager_ones_bit_for_bit(params: Params) -> None:
    """Under the strict recorder: outputs poisoned, constants held to their addresses, every operation as it was."""
    token, kv, view = begun(params)
    draw, mine = draws([Sampling(temperature=0.7)] * len(LENGTHS), CONFIG.vocab_size), copied(kv)
    expected, arenas, at, now = list[list[int]](), Arenas(mine.k, mine.v), view, token
    with torch.inference_mode():
        for _ in range(4):
            now, past, new, arenas = decode_and_sample(params, now, arenas, at, draw, (), CONFIG)
            at = View(view.table_GBN, past, new)
            expected.append(now.flatten().tolist())
    steps, kv = capture_decode(params, kv, CONFIG, sizes=[Bucket(len(LENGTHS), view.table_GBN.shape[2])], strict=True)
    feed, found = steps.begin(token, view, draw, kv), list[list[int]]()
    for _ in range(4):
        feed, kv = steps(feed, kv)
        found.append(feed.tokens_B1.flatten().tolist()[: len(LENGTHS)])
    assert found == expected
    for x, y in zip((*kv.k, *kv.v), (*arenas.k, *arenas.v), strict=True):
        assert torch.equal(x[1:].nan_to_num(7.0), y[1:].nan_to_num(7.0))
