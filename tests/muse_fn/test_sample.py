"""Sampling: the generator's published test vectors, filters against a plain reference, independence of the batch."""

import math
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muse_fn.filters import keep
from muse_fn.kernels import gpu_sample
from muse_fn.sample import Sampling, draws, fold_in, gumbel, key, log_probability, sample, threefry
from muse_fn.sharding.mesh import STAGE, Mesh
from muse_fn.sharding.simulated import simulate
from tests.models import SEEDS, close


def word(x: int) -> torch.Tensor:
    return torch.tensor(x - (1 << 32) if x >> 31 else x, dtype=torch.int32)


# Known answers for Threefry-2x32-20 as published with Random123: counter, key, result.
VECTORS = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize(("counter", "keys", "result"), VECTORS)
def test_threefry_gives_the_published_answers(
    counter: tuple[int, int], keys: tuple[int, int], result: tuple[int, int]
) -> None:
    found = threefry(word(keys[0]), word(keys[1]), word(counter[0]), word(counter[1]))
    assert tuple(int(x) & 0xFFFFFFFF for x in found) == result


@given(st.integers(min_value=-(2**63), max_value=2**64 - 1))
def test_key_keeps_64_bits_of_the_seed(seed: int) -> None:
    high, low = (int(x) & 0xFFFFFFFF for x in key(seed))
    assert (high << 32 | low) == seed % 2**64


def test_gumbel_noise_has_the_right_mean_and_spread_and_is_finite() -> None:
    noise = gumbel(fold_in(key(3).expand(64, 2), torch.arange(64)), 4096)
    assert torch.isfinite(noise).all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.02)
    assert noise.std().item() == pytest.approx(math.pi / math.sqrt(6), abs=0.02)


def test_gumbel_noise_of_an_id_does_not_depend_on_the_vocabulary() -> None:
    keys = key(5)[None]
    assert torch.equal(gumbel(keys, 101)[:, :50], gumbel(keys, 50))


def plain_reference(logits: list[float], s: Sampling) -> dict[int, float]:
    """Probabilities by the text of the documentation, token by token, in Python floats."""
    weights = {i: math.exp(x / s.temperature) for i, x in enumerate(logits)}
    order = sorted(weights, key=lambda i: (-weights[i], i))
    if s.top_k > 0:
        order = order[: s.top_k]
    total = sum(weights[i] for i in order)
    kept, before = [], 0.0
    for i in order:
        if before < s.top_p or not kept:
            kept.append(i)
        before += weights[i] / total
    kept = [i for i in kept if weights[i] >= s.min_p * weights[kept[0]]]
    total = sum(weights[i] for i in kept)
    return {i: weights[i] / total for i in kept}


LOGITS = [3.0, 2.0, 1.0, 0.0, -5.0]
SETTINGS = [
    Sampling(temperature=t, top_k=k, top_p=p, min_p=m)
    for t in (0.5, 2.0)
    for k in (0, -1, 1, 2, 9999)
    for p in (1.0, 0.6)
    for m in (0.0, 0.2)
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_filters_keep_what_the_reference_keeps(settings: Sampling) -> None:
    scaled = (torch.tensor([LOGITS]) - max(LOGITS)) / settings.temperature
    draw = draws([settings], len(LOGITS))
    kept = keep(scaled, draw.top_k_B, draw.top_p_B, draw.min_p_B)[0]
    assert set(torch.isfinite(kept).nonzero()[:, 0].tolist()) == set(plain_reference(LOGITS, settings))


def test_frequencies_equal_the_reference() -> None:
    rows = 50_000
    settings = Sampling(temperature=2.0, top_k=4, top_p=0.95, min_p=0.1, seed=11)
    draw = draws([settings], len(LOGITS))
    wide = type(draw)(*(part.expand(rows, *part.shape[1:]) for part in draw))
    tokens = sample(torch.tensor([LOGITS]).expand(rows, -1), wide, torch.arange(rows))
    expected = plain_reference(LOGITS, settings)
    for i in range(len(LOGITS)):
        share = (tokens == i).float().mean().item()
        p = expected.get(i, 0.0)
        assert abs(share - p) <= 5 * math.sqrt(p * (1 - p) / rows), f"token {i}: drawn {share}, expected {p}"


def test_rows_do_not_depend_on_their_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(SETTINGS), 40, generator=generator)
    seeded = [Sampling(s.temperature, s.top_k, s.top_p, s.min_p, seed=i) for i, s in enumerate(SETTINGS)]
    positions = torch.arange(len(seeded)) * 7
    together = sample(logits, draws(seeded, 40), positions)
    alone = [
        sample(logits[i : i + 1], draws([s], 40), positions[i : i + 1], filtered=s.is_filtered)
        for i, s in enumerate(seeded)
    ]
    assert torch.equal(together, torch.cat(alone))


def test_greedy_takes_the_first_maximum_and_ignores_the_seed() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    for seed in range(20):
        assert sample(logits, draws([Sampling(seed=seed)], 4), torch.tensor([seed])).tolist() == [1]


def test_ids_without_a_token_are_never_drawn() -> None:
    logits = torch.tensor([[0.0, 0.0, 90.0, 99.0]]).expand(200, -1)
    for temperature in (0.0, 5.0):
        draw = draws([Sampling(temperature=temperature, seed=s) for s in range(200)], 4)
        found = sample(logits, draw, torch.arange(200), allowed_V=torch.tensor([True, False, True, False]))
        assert set(found.tolist()) <= {0, 2}


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-40, 1e-45])
def test_the_smallest_temperatures_are_greedy(temperature: float) -> None:
    logits = torch.tensor([[0.0, 3.0, 9.0, 8.5]])
    for top_k in (0, 3):
        draw = draws([Sampling(temperature=temperature, top_k=top_k, seed=5)], 4)
        assert sample(logits, draw, torch.tensor([3])).tolist() == [2]


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -0.1), ("temperature", math.nan), ("top_k", -2), ("top_p", 0.0), ("top_p", 1.1), ("min_p", 1.5)],
)
def test_bad_settings_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} is "):
        Sampling(**{field: value})  # type: ignore[arg-type]


DRAWN = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.0, 1e-30, 0.7, 1.0, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 5]),
    top_p=st.sampled_from([1.0, 1.0, 0.7, 1e-6]),
    min_p=st.sampled_from([0.0, 0.0, 0.2, 1.0]),
    seed=st.integers(0, 2**63),
)
SPLIT = [Mesh(1, 2), Mesh(2, 2), Mesh(2, 4), Mesh(8, 1), Mesh(1, 3), Mesh(1, 2, pp=2)]


def share(x: torch.Tensor, m: Mesh) -> torch.Tensor:
    """The columns of this rank."""
    each = x.shape[-1] // m.size(STAGE)
    return x[..., m.index(STAGE) * each :][..., :each]


@given(st.data(), st.sampled_from(SPLIT), st.sampled_from([1, 1, 2, 5]), st.lists(DRAWN, min_size=1, max_size=4))
def test_shares_of_the_vocabulary_draw_what_the_whole_draws(
    data: st.DataObject, mesh: Mesh, each: int, asked: list[Sampling]
) -> None:
    """Few distinct logits, so that maxima lie on several ranks; ranks without an allowed id; rows bad on one rank."""
    vocab, rows = each * mesh.size(STAGE), len(asked)
    numbers = st.sampled_from(
        [0.0, -0.0, 1.0, 2.0, -3.0, 1e30, float("nan")] if data.draw(st.booleans()) else [1.0, 2.0]
    )
    cells = data.draw(st.lists(numbers, min_size=rows * vocab, max_size=rows * vocab))
    logits, first = torch.tensor(cells).view(rows, vocab), data.draw(st.integers(0, vocab - 1))
    allowed = torch.arange(vocab) >= first
    draw, pos = draws(asked, vocab), torch.arange(rows) * 1000
    whole = sample(logits, draw, pos, allowed_V=allowed)
    for b, s in enumerate(asked):
        row = logits[b].masked_fill(~allowed, -math.inf)
        if not logits[b].isfinite().all():
            assert whole[b] == -1
        elif s.temperature == 0 or s.top_k == 1:
            assert whole[b] == (row == row.max()).nonzero()[0, 0], "the lowest id of the largest logit"
    for found in simulate(mesh, lambda m: sample(share(logits, m), draw, pos, allowed_V=allowed, mesh=m)):
        assert torch.equal(found, whole)


@given(st.sampled_from(SPLIT), SEEDS, st.integers(1, 5))
def test_log_probabilities_from_shares_are_those_of_the_whole(mesh: Mesh, seed: int, each: int) -> None:
    vocab = each * mesh.size(STAGE)
    draw = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(vocab, vocab, generator=draw) + 200 * torch.randn(vocab, 1, generator=draw)
    ids = torch.arange(vocab)  # every id, those at the borders of ranks too
    expected = logits.double().log_softmax(-1).diagonal().float()
    for found in simulate(mesh, lambda m: log_probability(share(logits, m), ids, m)):
        close(found, expected, 1e-5)


@given(
    st.integers(0, 2**32),
    st.sampled_from([Mesh(), Mesh(tp=2), Mesh(ep=2, tp=2)]),
    st.sampled_from(["greedy", "drawn", "both"]),
    st.booleans(),
)
@settings(max_examples=8)
def test_kernels_draw_what_the_plain_form_draws(seed: int, mesh: Mesh, rows: str, masked: bool) -> None:
    """As on a CUDA device, by Triton's interpreter; a row that is not finite and one whose logits are all equal too."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, 44, generator=generator)
    logits[1, 40], logits[2] = torch.nan, 1.0
    allowed = torch.rand(44, generator=generator) < 0.7 if masked else None
    heat = {"greedy": [0.0] * 4, "drawn": [0.5, 1.0, 2.0, 1e-3], "both": [0.0, 1.0, 0.7, 0.0]}[rows]
    draw = draws([Sampling(t, seed=seed + n) for n, t in enumerate(heat)], 44)
    pos, greedy = torch.arange(4) + 7, rows == "greedy"
    going = torch.tensor([True, True, True, False]) if seed % 2 else None
    wanted = sample(logits, draw, pos, allowed_V=allowed, filtered=False, going_B=going)
    one_at_a_time = threading.Lock()  # ranks are threads here, and the interpreter has one state

    def guarded(fn: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with one_at_a_time:
                return fn(*args)

        return run

    def no_reason(where: torch.device) -> str:
        return ""

    forms = {fn.__name__: guarded(fn) for fn in (gpu_sample.tops, gpu_sample.draw, gpu_sample.tokens)}
    kernels = SimpleNamespace(why_not=gpu_sample.why_not, **forms)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("muse_fn.sample.why_no_triton", no_reason)
        patch.setattr("muse_fn.sample._triton_form", lambda: kernels)

        def run(m: Mesh) -> torch.Tensor:
            how: dict[str, Any] = {"allowed_V": allowed, "filtered": False, "greedy": greedy, "going_B": going}
            return sample(share(logits, m), draw, pos, **how, mesh=m)

        for found in simulate(mesh, run):
            assert torch.equal(found, wanted)
    assert wanted[1] == -1
    assert (wanted[3] == -1) == (going is not None)
