"""The table of Triton forms, in the interpreter: what fits is computed by them, what does not by the plain forms."""

import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from muse_fn.decoder import Chunk, Hidden, hidden_states
from muse_fn.kernels import gpu, gpu_linear_form, gpu_ops, pieces, reference, select, static
from muse_fn.kernels.norms import Gain, Mix, Rotary, rotary_angles
from muse_fn.kernels.packed import quantise_mxfp4
from muse_fn.kernels.pieces import Chosen, Joined
from muse_fn.kernels.select import REFERENCE, Ops
from muse_fn.kvcache.cache import View
from muse_fn.params.config import Config
from muse_fn.params.tree import Layer, MoE, Params
from muse_fn.sharding.mesh import Mesh
from muse_fn.sharding.split import shard
from muse_fn.step import Ran, advance, run
from tests.models import SMALL, close, on_arrays, random_params, random_tokens, scattered_cache

NO_DEVICE = gpu.why_not(torch.device("cpu"))
pytestmark = [
    pytest.mark.skipif(bool(NO_DEVICE), reason=f"no place to run device kernels: {NO_DEVICE}"),
    # Where exp overflows a quotient is 0, as it should be; numpy, which the interpreter computes with, warns.
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),
]

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
OPTIONAL = ("attend_new", "prepare")  # that some tables have
OPERATIONS = [field.name for field in fields(Ops) if field.name not in ("why", *OPTIONAL)]
FORMS = {name: getattr(gpu_ops, name) for name in OPERATIONS}
TABLE = Ops(why="Triton, in its interpreter", attend_new=gpu_ops.attend_new, **FORMS)
INNER = ("linear", "sigmoid")  # keywords of the plain forms that no table passes
TOLERANCE = 2**-6  # of the largest: results in bfloat16, rounded once more or once less on the way

Args = tuple[Any, ...]


@pytest.fixture(autouse=True)
def nothing_said() -> Iterator[None]:
    """Every test starts as a process does: no reason has been logged yet."""
    gpu_ops._say.cache_clear()  # pyright: ignore[reportPrivateUsage]
    yield
    gpu_ops._say.cache_clear()  # pyright: ignore[reportPrivateUsage]


def home(name: str) -> Any:
    """The file with the plain form that takes over where Triton's does not fit."""
    if name in ("attend", "attend_blocks", "expert_rows"):
        return static
    return reference if name in vars(reference) else pieces


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_is_there_with_the_signature_of_its_definition(name: str) -> None:
    definition = vars(reference if name in vars(reference) else pieces)[name]
    found, expected = (
        [(p.name, p.kind, p.default) for p in inspect.signature(form).parameters.values() if p.name not in INNER]
        for form in (getattr(gpu_ops, name), definition)
    )
    assert found == expected


def test_a_cuda_device_gets_this_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "why_no_triton", lambda where: "")  # pyright: ignore[reportUnknownLambdaType]
    cuda = torch.device("cuda")
    with torch.no_grad():
        found = select.select(cuda)
    assert [getattr(found, name) for name in OPERATIONS] == [getattr(gpu_ops, name) for name in OPERATIONS]
    assert found.attend_new is gpu_ops.attend_new
    assert "Triton" in found.why
    assert select.select(cuda) is select.STATIC, "under gradients"


def draw(seed: int, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linears(dtype: torch.dtype = BF16, count: int = 2, rows: int = 3) -> Args:
    return draw(0, rows, 64, dtype=dtype), [draw(n, 5 + n, 64) / 8 for n in range(count)]


def linear(dtype: torch.dtype = BF16, **changed: int) -> Args:
    x, (w,) = linears(dtype, 1, **changed)
    return x, w


def attend(dtype: torch.dtype = BF16, heads: int = 4, width: int = 16) -> Args:
    q, k, v = (draw(n, 2, 5, count, width, dtype=dtype) for n, count in enumerate((heads, 2, 2)))
    pos = torch.arange(5).expand(2, -1)
    return q, k, v, pos, pos, 3, True


def blocks(dtype: torch.dtype = BF16, heads: int = 4, width: int = 16, new: int = 1, step: int = 1) -> Args:
    """Two sequences of 8 positions; a `step` of 2 leaves out every second element of a wider arena."""
    arenas = [draw(n, 7, 4, 2, width * step, dtype=dtype)[..., ::step] for n in (1, 2)]
    pos = torch.arange(8).expand(2, -1)
    q = draw(0, 2, new, heads, width, dtype=dtype)
    return q, *arenas, torch.tensor([[1, 4], [2, 6]]), pos[:, -new:], pos, 0, False


def experts(dtype: torch.dtype = BF16, latent: int = 128, inner: int = 128, mixed: bool = False) -> Args:
    gate_up, down = draw(1, 3, 2 * inner, latent, dtype=F32) / 8, draw(2, 3, latent, inner, dtype=F32) / 8
    idx = torch.tensor([[0, 2], [-1, 1], [1, 2]])
    packed = quantise_mxfp4(gate_up), down.to(dtype) if mixed else quantise_mxfp4(down)
    return draw(0, 3, latent, dtype=dtype), idx, *packed


def normed(dtype: torch.dtype = BF16, width: int = 24) -> Args:
    return draw(0, 2, 3, width, dtype=dtype), Gain(draw(1, width, dtype=F32)), 1e-5, BF16


def join(dtype: torch.dtype = F32, width: int = 24, parts: int = 2) -> Args:
    h, branch = draw(0, 2, 3, width, dtype=dtype), draw(1, parts, 2, 3, width // parts, dtype=dtype)
    scale, alpha, beta, norm = (draw(n, width, dtype=F32) for n in (2, 3, 4, 5))
    return h, branch, Gain(scale), Mix(alpha, beta), Gain(norm), 1e-8, 1e-5, BF16


def angles(width: int) -> Rotary:
    return rotary_angles(torch.arange(3).expand(2, -1), width, 1e4)


def heads(dtype: torch.dtype = BF16, width: int = 8) -> Args:
    q, k = draw(0, 2, 3, 4 * width, dtype=dtype), draw(1, 2, 3, 2 * width, dtype=dtype)
    return q, k, None if width % 2 else angles(width), width, 0.5, 1e-5


def place(dtype: torch.dtype = BF16, width: int = 8) -> Args:
    q, k, rotary, _, scale, eps = heads(dtype, width)
    arenas = (torch.zeros(3, 4, 2, width, dtype=dtype) for _ in "kv")
    return q, k, draw(2, 2, 3, 2 * width, dtype=dtype), rotary, scale, eps, *arenas, torch.tensor([4, 5, 6, 9, 10, 1])


def gated(dtype: torch.dtype = BF16, width: int = 8) -> Args:
    return draw(0, 2, 3, 4, width, dtype=dtype), draw(1, 2, 3, 4 * width, dtype=dtype), 1e-5, BF16


def choose(dtype: torch.dtype = F32, count: int = 6, top_k: int = 2, width: int = 24) -> Args:
    logits, bias = draw(0, 3, count, dtype=dtype), draw(1, count, dtype=F32)
    return logits, bias, top_k, 1.0, 2.5, draw(2, 2, 3, width // 2), Gain(draw(3, width, dtype=F32)), 1e-5, BF16


def blend(dtype: torch.dtype = BF16, width: int = 24, routes: int = 2) -> Args:
    weight = draw(1, 3, routes, dtype=F32).abs()
    return draw(0, 3, routes, width, dtype=dtype), weight, Gain(draw(2, width, dtype=F32)), 1e-8, F32


def strided(args: Args) -> Args:
    """The same, the last of its matrices stored by columns."""
    x, w = args
    return x, w.t().contiguous().t()


# For each operation what fits, and what does not with a part of the reason that is logged.
FITS: list[tuple[str, Callable[[], Args]]] = [
    *(("linear", f) for f in (linear, lambda: linear(F32), lambda: linear(rows=1), lambda: linear(rows=16))),
    *(("linears", f) for f in (linears, lambda: linears(count=4), lambda: (*linears(), F32))),
    *(("attend", f) for f in (attend, lambda: attend(F32), lambda: attend(width=80))),
    *(("attend_blocks", f) for f in (blocks, lambda: blocks(new=2), lambda: blocks(F32), lambda: blocks(new=7))),
    ("expert_rows", experts),
    *(("normed", f) for f in (normed, lambda: normed(F32), lambda: normed(torch.float16, 7))),
    *(("join", f) for f in (join, lambda: join(width=7, parts=1))),
    *(("heads", f) for f in (heads, lambda: heads(F32, 6))),
    *(("place", f) for f in (place, lambda: place(F32, 6))),
    *(("gated", f) for f in (gated, lambda: gated(F32, 6))),
    *(("choose", f) for f in (choose, lambda: choose(count=31, top_k=8))),
    *(("blend", f) for f in (blend, lambda: blend(F32, 7, 3))),
]
DOES_NOT: list[tuple[str, Callable[[], Args], str]] = [
    ("linear", lambda: linear(F64), "float64"),
    ("linear", lambda: strided(linear()), "contiguous"),
    ("linear", lambda: (draw(0, 3, 64), quantise_mxfp4(draw(1, 8, 64, dtype=F32))), "packed"),
    ("linears", lambda: linears(count=5), "5 matrices"),
    ("attend", lambda: attend(F64), "float64"),
    ("attend", lambda: attend(width=264), "264"),
    ("attend", lambda: attend(heads=2 * 1024), "1024 heads"),
    ("attend_blocks", lambda: blocks(F64), "float64"),
    ("attend_blocks", lambda: blocks(width=264), "264"),
    ("attend_blocks", lambda: blocks(step=2), "one element after the other"),
    ("expert_rows", lambda: experts(F32), "float32"),
    ("expert_rows", lambda: experts(latent=64), "by 64"),
    ("expert_rows", lambda: experts(inner=96), "96 by"),
    ("expert_rows", lambda: experts(mixed=True), "different formats"),
    ("normed", lambda: normed(F64), "float64"),
    ("normed", lambda: normed(width=40000), "40000"),
    ("join", lambda: join(F64), "float64"),
    ("join", lambda: join(width=40000), "40000"),
    ("heads", lambda: heads(F64), "float64"),
    ("heads", lambda: heads(width=5), "width 5"),
    ("place", lambda: place(F64), "float64"),
    ("place", lambda: place(width=5), "width 5"),
    ("gated", lambda: gated(F64), "float64"),
    ("gated", lambda: gated(width=5), "width 5"),
    ("choose", lambda: choose(F64), "float64"),
    ("choose", lambda: choose(count=1100), "1100"),
    ("choose", lambda: choose(count=200, top_k=100), "top_k is 100"),
    ("choose", lambda: choose(width=40000), "40000"),
    ("blend", lambda: blend(F64), "float64"),
    ("blend", lambda: blend(width=40000), "40000"),
]


def results(name: str, form: Callable[..., Any], args: Args) -> list[Tensor]:
    """All that an operation makes: what it returns, and the arenas that it writes into."""
    found = form(*args)
    if isinstance(found, Chosen):
        return [*found.routes, found.u_TM]
    if isinstance(found, Joined):
        return [found.h, found.a]
    return [*([found] if isinstance(found, Tensor) else found), *(args[6:8] if name == "place" else ())]


def test_every_operation_is_tried_both_ways() -> None:
    ours = {name for name in OPERATIONS if getattr(gpu_ops, name) is not vars(home(name))[name]}
    assert {name for name, _ in FITS} == {name for name, *_ in DOES_NOT} == ours
    assert {*OPERATIONS} - ours == {"silu"}


@pytest.mark.parametrize(("name", "make"), FITS)
def test_what_fits_equals_the_definition(
    name: str, make: Callable[[], Args], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "muse_fn.kernels")
    definition = vars(reference if name in vars(reference) else pieces)[name]
    expected = results(name, definition, make())

    def wrong(*args: object, **more: object) -> None:
        raise AssertionError("this is the plain form")

    monkeypatch.setattr(reference if name == "linears" else home(name), "linear" if name == "linears" else name, wrong)
    found = results(name, getattr(gpu_ops, name), make())
    for f, e in zip(found, expected, strict=True):
        assert (f.dtype, f.shape) == (e.dtype, e.shape)
        if f.is_floating_point():
            top = e.float().abs().max().clamp_min(1e-30)
            close(f.float() / top, e.float() / top, TOLERANCE if BF16 in (f.dtype, make()[0].dtype) else 1e-3)
        else:
            assert torch.equal(f, e)
    assert caplog.records == []


@pytest.mark.parametrize(("name", "make", "reason"), DOES_NOT)
def test_what_does_not_fit_is_plain_and_said_once(
    name: str, make: Callable[[], Args], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "muse_fn.kernels")
    expected = results(name, vars(home(name))[name], make())
    for _ in range(2):
        found = results(name, getattr(gpu_ops, name), make())
        for f, e in zip(found, expected, strict=True):
            assert f.dtype == e.dtype
            assert torch.equal(f, e)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.partition(":")[0] in (name, f"{name}s")
    assert reason in said


def test_many_rows_are_the_librarys_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "muse_fn.kernels")
    for rows in (0, 17, 40):
        x, w = linear(rows=rows)
        assert torch.equal(gpu_ops.linear(x, w), reference.linear(x, w))
    assert caplog.records == []


# Latent and inner widths of whole groups, so that packed experts fit; ragged everywhere else.
TINY = replace(SMALL, hidden_size=48, heads=6, head_dim=10, latent_size=128, expert_size=128)
BOUND = 2**-6  # of a row of the stream, in the Euclidean norm: some thirty roundings to bfloat16 on either side


def packed_params(seed: int, config: Config = TINY) -> Params:
    """bfloat16, with the experts of every layer in MXFP4."""
    params = random_params(config, seed, BF16)

    def packed(layer: Layer) -> Layer:
        if not isinstance(layer.mlp, MoE):
            return layer
        p = layer.mlp.experts
        assert isinstance(p.gate_up, Tensor)
        assert isinstance(p.down, Tensor)
        p = p._replace(gate_up=quantise_mxfp4(p.gate_up.float()), down=quantise_mxfp4(p.down.float()))
        return layer._replace(mlp=layer.mlp._replace(experts=p))

    return params._replace(layers=tuple(map(packed, params.layers)))


def same_stream(found: Hidden | Ran, expected: Hidden | Ran) -> None:
    """The same experts, and each row of the stream within BOUND of its length."""
    for f, e in zip(found.routes, expected.routes, strict=True):
        assert isinstance(f, Tensor) == isinstance(e, Tensor)
        if isinstance(f, Tensor) and isinstance(e, Tensor):
            assert torch.equal(f, e)
    assert found.h_BTH.dtype == F32
    error = (found.h_BTH - expected.h_BTH).norm(dim=-1) / expected.h_BTH.norm(dim=-1)
    assert error.max() <= BOUND


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("form", ["few rows", "many rows", "plain"])
def test_no_attention_asks_whether_a_step_is_a_prompts_first(
    form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured step, which cannot know, would else have other bits than an eager one."""
    if form == "many rows":
        monkeypatch.setattr(gpu_ops.gpu_attention, "why_not", lambda *args: "too many")  # pyright: ignore[reportUnknownLambdaType]
    in_blocks, alone = blocks(dtype, new=8, step=1 + (form == "plain")), attend(dtype, heads=4)
    cases: list[tuple[Callable[..., Tensor], Args]] = [(gpu_ops.attend_blocks, in_blocks), (gpu_ops.attend, alone)]
    for op, args in cases:
        assert torch.equal(op(*args[:-1], True), op(*args[:-1], False))


@pytest.fixture
def large_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time for every program: fewer of them, each with more of a matrix."""
    monkeypatch.setattr(gpu_linear_form, "OUT", 64)
    monkeypatch.setattr(gpu_linear_form, "STEP", 128)


@pytest.mark.usefixtures("large_programs")
@pytest.mark.parametrize("length", [1, 9])
def test_a_model_without_a_cache(length: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "muse_fn.kernels")
    params, tokens = packed_params(0), random_tokens(TINY, 1, 2, length)
    chunk = Chunk(tokens, torch.arange(length).expand(2, -1), is_start=True)
    found, expected = (hidden_states(params, [chunk], (), TINY, ops) for ops in (TABLE, REFERENCE))
    same_stream(found, expected)
    assert caplog.records == [], "all of it fits"


class Alike:
    """A link to ranks that all give what this one gives; what is gathered is not stored again."""

    def all_sum(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        return x * len(peers)

    def sum_scatter(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        return x.unflatten(0, (len(peers), -1))[0] * len(peers)

    def all_gather(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        return x.expand(len(peers), *x.shape)

    def all_to_all(self, x: Tensor, peers: tuple[int, ...]) -> Tensor:
        return x.unflatten(0, (len(peers), -1))[:1].expand(len(peers), *[-1] * x.dim())

    def broadcast(self, x: Tensor, source: int, peers: tuple[int, ...]) -> Tensor:
        return x

    def pass_on(self, x: Tensor | None, to: int, into: Tensor | None, source: int) -> Tensor | None:
        return into


@pytest.mark.usefixtures("large_programs")
@pytest.mark.parametrize("mesh", [Mesh(2, 1, squeeze="split"), Mesh(1, 2, squeeze="split")], ids=str)
def test_a_ranks_part_of_a_model(mesh: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    """Rows in parts, experts from a later one on, products to be summed: one token, whose embedding this rank has."""
    caplog.set_level(logging.INFO, "muse_fn.kernels")
    config = replace(TINY, vocab_size=64, experts=6, expert_size=256)
    mesh = mesh.at(1, Alike())
    params = shard(packed_params(0, config), config, mesh)
    chunk = Chunk(torch.tensor([[40]]), torch.tensor([[0]]), is_start=True)
    found, expected = (hidden_states(params, [chunk], (), config, ops, mesh) for ops in (TABLE, REFERENCE))
    same_stream(found, expected)
    assert caplog.records == [], "all of it fits"


@pytest.mark.usefixtures("large_programs")
def test_a_model_with_a_cache(caplog: pytest.LogCaptureFixture) -> None:
    """Two sequences of different lengths, each read in two chunks, then decoded, over pages of NaN."""
    caplog.set_level(logging.INFO, "muse_fn.kernels")
    params, tokens = packed_params(0), random_tokens(TINY, 1, 2, 24)
    (kv, table), (plain_kv, _) = (scattered_cache(TINY, 2, 24, 4, 0) for _ in range(2))
    kv, plain_kv = (on_arrays(lambda x: x.to(BF16), each) for each in (kv, plain_kv))
    view = View(table, torch.tensor([0, 0]), torch.tensor([9, 5]))
    for widest, counts in ((9, [9, 5]), (4, [3, 4]), (1, [1, 1])):
        view = view._replace(count_B=torch.tensor(counts))
        columns = (view.past_B[:, None] + torch.arange(widest)).clamp_max(23)
        step = tokens.gather(1, columns)
        is_start = not view.past_B.any()
        found = run(params, step, kv, view, TINY, is_start=is_start, ops=TABLE)
        expected = run(params, step, plain_kv, view, TINY, is_start=is_start, ops=REFERENCE)
        real = torch.arange(widest) < view.count_B[:, None]
        same_stream(rows_of(found, real), rows_of(expected, real))
        kv, plain_kv, view = found.kv, expected.kv, advance(view)
    assert caplog.records == [], "all of it fits"


def rows_of(ran: Ran, real_BT: Tensor) -> Ran:
    """Without padding, what comes out of which means nothing."""
    routes = tuple(x[real_BT] if isinstance(x, Tensor) else x for x in ran.routes)
    return Ran(ran.h_BTH[real_BT], ran.kv, routes)
