"""Layers prepared for many steps: the bits of steps that are not, and who takes what is not theirs."""

import copy
import logging
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from muse_fn.decoder import Scales, prepared, scales
from muse_fn.kernels import cpu_calls, cpu_ops, cpu_whole
from muse_fn.kernels.select import EAGER, REFERENCE, Ops
from muse_fn.kvcache.cache import KVCache, View
from muse_fn.params.quantise import quantise_experts
from muse_fn.params.tree import Params, map_tensors, tensors
from muse_fn.step import decode, prefill, run_on
from tests.kernels.test_cpu_steps import BF16, CONFIG, LENGTHS, begun
from tests.models import copied, random_params, random_tokens

pytest.importorskip("numba", reason="Numba is not installed")
SPARSE = [n for n, kind in enumerate(CONFIG.mlp_layer_types) if kind == "sparse"]


@pytest.fixture(scope="module", params=["bf16", "mxfp4"])
def params(request: pytest.FixtureRequest) -> Params:
    plain = random_params(CONFIG, 0, BF16)
    return plain if request.param == "bf16" else quantise_experts(plain, CONFIG)


@pytest.fixture
def every(params: Params) -> tuple[Scales, ...]:
    with torch.no_grad():
        return prepared(params, CONFIG)


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each layer that was asked whether it takes a step, whether it did."""
    found, plan_of = list[bool](), cpu_whole._plan_of  # pyright: ignore[reportPrivateUsage]

    def asked(*args: Any) -> Any:
        plan = plan_of(*args)
        found.append(plan is not None)
        return plan

    monkeypatch.setattr(cpu_whole, "_plan_of", asked)
    return found


def step(
    params: Params, tokens: Tensor, kv: KVCache, view: View, every: tuple[Scales, ...] = (), ops: Ops | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Logits, and the bits of all of the cache but the block of padding: some of it is no number."""
    with torch.no_grad():
        out, kv = decode(params, tokens, copied(kv), view, CONFIG, every=every, ops=ops)
    return out, [x[1:].view(torch.int16) for x in (*kv.k, *kv.v)]


def check_equal(params: Params, tokens: Tensor, kv: KVCache, view: View, every: tuple[Scales, ...]) -> None:
    (found, mine), (expected, theirs) = step(params, tokens, kv, view, every), step(params, tokens, kv, view)
    assert torch.equal(found, expected)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_layers_with_experts_are_prepared_and_steps_keep_their_bits(
    params: Params, every: tuple[Scales, ...], layers: list[bool]
) -> None:
    assert SPARSE
    assert [n for n, s in enumerate(every) if s.whole is not None] == SPARSE
    check_equal(params, *begun(params), every)
    assert layers == [True] * len(SPARSE)


@pytest.mark.parametrize("length", [2, 4])
def test_so_do_steps_of_a_few_tokens_with_padding(
    params: Params, every: tuple[Scales, ...], length: int, layers: list[bool]
) -> None:
    _, kv, view = begun(params)
    tokens, count = random_tokens(CONFIG, 1, len(LENGTHS), length), torch.tensor([length, 1, length - 1])
    (found, mine), (expected, theirs) = (
        step(params, tokens, kv, view._replace(count_B=count), given) for given in (every, ())
    )
    for n in range(len(LENGTHS)):  # of what padding becomes nothing is said
        assert torch.equal(found[n, : count[n]], expected[n, : count[n]])
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert layers == [True] * len(SPARSE)


def test_one_prepared_model_serves_steps_of_all_sizes(params: Params, every: tuple[Scales, ...]) -> None:
    token, kv, view = begun(params)
    for threads in (2, 1):
        torch.set_num_threads(threads)
        try:
            for batch in (1, 3, 2, 1):
                own = View(view.table_GBN[:, :batch], view.past_B[:batch], view.count_B[:batch])
                check_equal(params, token[:batch], kv, own, every)
        finally:
            torch.set_num_threads(1)


def test_long_steps_and_many_rows_are_left_to_each_operation(
    params: Params, every: tuple[Scales, ...], layers: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    token, kv, view = begun(params)
    tokens, count = random_tokens(CONFIG, 1, len(LENGTHS), 5), torch.full((len(LENGTHS),), 5)
    check_equal(params, tokens, kv, view._replace(count_B=count), every)
    monkeypatch.setitem(cpu_ops.MOST, True, cpu_ops.Most(2, 2, 2))
    monkeypatch.setitem(cpu_ops.MOST, False, cpu_ops.Most(2, 2, 2))
    check_equal(params, token, kv, view, every)
    assert layers == [False] * (2 * len(SPARSE))


def test_other_tables_and_gradients_do_not_take_what_was_prepared(
    params: Params, every: tuple[Scales, ...], layers: list[bool]
) -> None:
    token, kv, view = begun(params)
    for ops in (EAGER, REFERENCE):
        with torch.no_grad():
            found, _ = decode(params, token, copied(kv), view, CONFIG, every=every, ops=ops)
        expected, _ = step(params, token, kv, view, ops=ops)
        assert torch.equal(found, expected)
    decode(params, token, copied(kv), view, CONFIG, every=every)  # where gradients may be wanted
    assert not layers


def test_a_prompt_may_be_read_with_what_was_prepared(params: Params, every: tuple[Scales, ...]) -> None:
    tokens, (_, kv, view) = random_tokens(CONFIG, 2, len(LENGTHS), 3), begun(params)
    empty = view._replace(past_B=view.past_B * 0, count_B=torch.full_like(view.past_B, 3))
    with torch.no_grad():
        found, expected = (prefill(params, tokens, copied(kv), empty, CONFIG, every=e)[0] for e in (every, ()))
    assert torch.equal(found, expected)


def test_models_of_other_dtypes_are_not_prepared_and_it_says_why(caplog: pytest.LogCaptureFixture) -> None:
    cpu_ops.say.cache_clear()
    with caplog.at_level(logging.INFO, "muse_fn.kernels"), torch.no_grad():
        every = prepared(random_params(CONFIG, 0), CONFIG)
        narrow = replace(CONFIG, latent_size=48, expert_size=48)
        none = prepared(random_params(narrow, 0, BF16), narrow)
    assert all(s.whole is None for s in (*every, *none))
    said = [r.getMessage() for r in caplog.records]
    assert any("not in bfloat16" in text for text in said)
    assert any("multiples of 32" in text for text in said)


def test_where_gradients_may_be_wanted_vectors_are_all_there_is(params: Params) -> None:
    every, expected = prepared(params, CONFIG), scales(params.layers, CONFIG)
    assert all(s.whole is None for s in every)
    assert all(torch.equal(a.attn_norm.factor, b.attn_norm.factor) for a, b in zip(every, expected, strict=True))


def test_helpers_of_another_process_are_not_asked(
    params: Params, every: tuple[Scales, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan holds where the helpers' state lies: with other helpers it is made anew."""
    token, kv, view = begun(params)
    check_equal(params, token, kv, view, every)
    monkeypatch.setattr(cpu_calls, "helpers", lambda threads: 0)  # pyright: ignore[reportUnknownLambdaType]
    torch.set_num_threads(2)
    try:
        check_equal(params, token, kv, view, every)
    finally:
        torch.set_num_threads(1)


def test_parameters_whose_storage_moved_are_found_where_they_are(params: Params, every: tuple[Scales, ...]) -> None:
    """Plans hold addresses: those of storage that may be gone are not used again, nor are those of another copy."""
    own, before = copy.deepcopy((params, every))
    tokens, kv, view = begun(own)
    step(own, tokens, kv, view, before)
    copied_params, copied_every = copy.deepcopy((own, before))
    for t in tensors(own):
        t.share_memory_()
    junk = [torch.full((1 << 16,), torch.nan) for _ in range(64)]  # lies where something else lay
    check_equal(own, tokens, kv, view, before)
    for t in tensors(own):
        t.zero_()
    check_equal(copied_params, tokens, kv, view, copied_every)
    for s in pickle.loads(pickle.dumps(copied_every)):
        assert s.whole is None or s.whole.plans == {}
    del junk


def test_layers_prepared_with_other_parameters_are_refused(params: Params, every: tuple[Scales, ...]) -> None:
    """All of them before the first layer runs, whoever would run it."""
    tokens, kv, view = begun(params)
    others = copy.deepcopy(params.layers)
    before = [x.clone().view(torch.int16) for x in (*kv.k, *kv.v)]
    for n in SPARSE:
        other = params._replace(layers=(*params.layers[:n], others[n], *params.layers[n + 1 :]))
        for ops in (None, EAGER):
            with (
                torch.no_grad(),
                pytest.raises(ValueError, match=rf"^every\[{n}\] was prepared for other parameters than these: "),
            ):
                decode(other, tokens, kv._replace(alive=kv.alive.clone()), view, CONFIG, every=every, ops=ops)
    assert all(torch.equal(a.view(torch.int16), b) for a, b in zip((*kv.k, *kv.v), before, strict=True))


def test_layers_up_to_the_first_that_does_not_take_a_step_are_one_call(
    params: Params, every: tuple[Scales, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others run by themselves, and the bits and routes are those of layers one by one."""
    token, kv, view = begun(params)
    form = cpu_ops.file_of("cpu_layer")
    calls, run_layers = list[int](), form.run_layers
    monkeypatch.setattr(form, "run_layers", lambda *args: (calls.append(len(args[0])), run_layers(*args))[1])  # pyright: ignore
    routes: dict[int, list[Tensor]] = {}
    for left_out in (-1, *SPARSE):
        kept = tuple(s._replace(whole=None) if n == left_out else s for n, s in enumerate(every))
        check_equal(params, token, kv, view, kept)
        with torch.no_grad():
            ran = run_on(params, token, copied(kv), view, CONFIG, every=kept)
        routes[left_out] = [x for x in ran.routes if isinstance(x, Tensor)]
        assert [x.shape for x in routes[left_out]] == [(*token.shape, CONFIG.top_k)] * len(SPARSE)
        assert all(torch.equal(a, b) for a, b in zip(routes[left_out], routes[-1], strict=True))
    assert max(calls) > 1
    assert min(calls) < max(calls)


def test_a_layer_before_one_of_another_dtype_is_not_prepared(params: Params) -> None:
    """It leaves its rows to the next one in that one's dtype."""
    layers = list(params.layers)
    last = layers[-1]
    layers[-1] = last._replace(attn=map_tensors(lambda t: t.float() if t.dtype == BF16 else t, last.attn))
    mixed = params._replace(layers=tuple(layers))
    with torch.no_grad():
        every = prepared(mixed, CONFIG)
    assert every[-2].whole is None
    assert every[-1].whole is None
