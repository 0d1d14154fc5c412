"""Forms without sizes that depend on data equal the reference, in any tiles, and look at no value."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from muse_fn.kernels import reference, static, streamed
from muse_fn.kernels.packed import Weight, quantise_mxfp4, quantise_nvfp4
from muse_fn.kernels.static import MOST_ROWS, rows_of_a_tile
from tests.models import SEEDS, close

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-6}


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights(form: str, seed: int, experts: int, dtype: torch.dtype) -> tuple[Weight, Weight]:
    gate_up, down = draw(seed, experts, 64, 64) / 8, draw(seed + 1, experts, 64, 32) / 8
    match form:
        case "mxfp4":
            return quantise_mxfp4(gate_up), quantise_mxfp4(down)
        case "nvfp4":
            return quantise_nvfp4(gate_up, 2), quantise_nvfp4(down)
        case _:
            return gate_up.to(dtype), down.to(dtype)


@given(
    SEEDS, st.sampled_from([1, 2, 7, 40, 300]), st.integers(1, 4), st.integers(1, 7), st.sampled_from([1, 5, 99]),
    DTYPES, st.sampled_from(["plain", "mxfp4", "nvfp4"]), st.sampled_from([1, 900_000, 256 << 20]),
)  # fmt: skip
def test_expert_rows(
    seed: int, count: int, routes: int, experts: int, spread: int, dtype: torch.dtype, form: str, workspace: int
) -> None:
    """Routes alone and in tiles, few experts taking all, others' routes among them, tiles one by one and together."""
    gate_up, down = weights(form, seed, experts, dtype)
    generator = torch.Generator().manual_seed(seed)
    idx = torch.randint(-1, min(spread, experts + 1), (count, routes), generator=generator)
    u = draw(seed + 2, count, 64).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(static, "WORKSPACE", workspace)
        found = static.expert_rows(u, idx, gate_up, down)
    assert found.dtype == dtype
    assert (found[(idx < 0) | (idx >= experts)] == 0).all()
    close(found, reference.expert_rows(u, idx, gate_up, down), TOLERANCE[dtype])


@given(st.integers(1, 100_000), st.integers(1, 700))
def test_rows_of_a_tile(routes: int, experts: int) -> None:
    rows = rows_of_a_tile(routes, experts)
    assert rows in {1 << n for n in range(7)}
    assert rows <= MOST_ROWS
    if rows > 1:
        assert routes // rows + min(experts, routes) <= routes, "never more matrices than taking each route alone"
        assert rows == MOST_ROWS or routes // rows < 2 * experts


@given(SEEDS, st.integers(1, 200), st.integers(1, 9), st.integers(1, 8))
def test_every_route_has_a_row_of_its_own_in_a_tile_of_its_expert(
    seed: int, count: int, experts: int, rows: int
) -> None:
    routes = torch.randint(0, experts + 1, (count,), generator=torch.Generator().manual_seed(seed)).sort().values
    place, expert = static._places(routes, experts, rows)  # pyright: ignore[reportPrivateUsage]
    found = [(p, e) for p, e in zip(place.tolist(), routes.tolist(), strict=True) if e < experts]
    assert max(Counter(p for p, _ in found).values(), default=1) == 1
    assert all(expert[p // rows] == e for p, e in found)
    assert set(place[routes == experts].tolist()) <= {len(expert) * rows}


@pytest.mark.parametrize("count", [3, 64])
@pytest.mark.parametrize("form", ["plain", "mxfp4", "nvfp4"])
def test_no_size_depends_on_values(form: str, count: int) -> None:
    """Run on tensors that have shapes and no values: whoever asks for one fails."""
    gate_up, down = weights(form, 0, 4, torch.bfloat16)
    u, idx = draw(1, count, 64).bfloat16(), torch.zeros(count, 2, dtype=torch.int64)
    static.expert_rows(u, idx, gate_up, down)  # the table of unpacked bytes is a constant, made once
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        parts = [w if isinstance(w, Tensor) else type(w)(*map(fake.from_tensor, w)) for w in (gate_up, down)]
        out = static.expert_rows(fake.from_tensor(u), fake.from_tensor(idx), *parts)
    assert out.shape == (count, 2, 64)


@given(SEEDS, st.integers(1, 3), st.integers(1, 9), st.integers(0, 6), st.sampled_from([1, 3000, 256 << 20]), DTYPES)
def test_attend(seed: int, batch: int, queries: int, window: int, workspace: int, dtype: torch.dtype) -> None:
    q, k, v = draw(seed, batch, queries, 6, 8), *draw(seed + 1, 2, batch, 11, 2, 8)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    generator = torch.Generator().manual_seed(seed)
    k_pos = torch.randint(-1, 9, (batch, 11), generator=generator)
    q_pos = torch.randint(0, 9, (batch, queries), generator=generator)
    k_pos[:, 0] = q_pos[:, 0]
    seen = reference.visible(q_pos, k_pos, window).any(-1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streamed, "WORKSPACE", workspace)
        found = static.attend(q, k, v, q_pos, k_pos, window)
    assert found.dtype == dtype
    close(found[seen], reference.attend(q, k, v, q_pos, k_pos, window)[seen], TOLERANCE[dtype])


@pytest.mark.parametrize(("workspace", "form"), [(1000, streamed), (1 << 20, reference)])
def test_long_contexts_are_read_in_tiles(workspace: int, form: object, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = draw(0, 2, 1, 6, 8), *draw(1, 2, 9, 4, 2, 8)
    blocks = torch.tensor([[1, 5, 2], [7, 3, 4]])
    where = torch.tensor([[10], [7]]), torch.arange(12).expand(2, 12)
    expected = reference.attend_blocks(q, k, v, blocks, *where, 5)
    called: list[str] = []
    for module in (streamed, reference):
        plain = module.attend_blocks

        def noted(*args: object, module: object = module, plain: object = plain) -> Tensor:
            called.append(getattr(module, "__name__", ""))
            return plain(*args)  # type: ignore[operator]

        monkeypatch.setattr(module, "attend_blocks", noted)
    monkeypatch.setattr(streamed, "WORKSPACE", workspace)
    close(static.attend_blocks(q, k, v, blocks, *where, 5), expected, 2e-6)
    assert called == [getattr(form, "__name__", "")]
