"""Each Triton form against its plain meaning, on random, boundary and adversarial inputs, on a CUDA device."""

# pyright: reportUnknownLambdaType=false

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from operands import (
    BF16,
    BLOCK,
    CUDA,
    EPS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LATENT,
    TOP_K,
    mxfp4,
    nvfp4,
    randn,
    routes,
)
from torch import Tensor

from muse_fn.kernels import gpu_ops, pieces, reference
from muse_fn.kernels.norms import Gain, Mix, Rotary, rotary_angles
from muse_fn.kernels.packed import Weight
from muse_fn.kernels.pieces import Chosen, Context, Joined, Projected
from muse_fn.kernels.select import AttendNew
from muse_fn.sample import Sampling, draws, sample

EXACT, ROUNDED = 1e-5, 2**-6  # bounds, relative to the largest: float32 results, and those rounded to bfloat16


class Check(NamedTuple):
    """A form and its meaning on the same inputs."""

    name: str
    found: Callable[[], Sequence[Tensor]]
    wanted: Callable[[], Sequence[Tensor]]
    bound: float


def expert_checks() -> Iterator[Check]:
    """Formats, numbers of tokens, one expert taking all, none here, scales at the ends of their range."""
    forms: dict[str, Callable[[], tuple[Weight, Weight]]] = {
        "MXFP4": lambda: (mxfp4(8, 2 * INNER, LATENT), mxfp4(8, LATENT, INNER)),
        "MXFP4, smallest scales": lambda: (mxfp4(8, 2 * INNER, LATENT, low=0, high=2), mxfp4(8, LATENT, INNER)),
        "MXFP4, large scales": lambda: (mxfp4(8, 2 * INNER, LATENT, low=180, high=220), mxfp4(8, LATENT, INNER)),
        "NVFP4": lambda: (nvfp4(8, 2 * INNER, LATENT, parts=2), nvfp4(8, LATENT, INNER)),
        "bfloat16": lambda: (randn(8, 2 * INNER, LATENT, dtype=BF16, scale=0.02), randn(8, LATENT, INNER, dtype=BF16)),
    }
    # The reference gathers a matrix for every route: of a few tokens only.
    size = {"MXFP4, smallest scales": 2.0**110, "MXFP4, large scales": 2.0**-90}
    for form, make in forms.items():
        gate_up, down = make()
        exact = [w.float() if isinstance(w, Tensor) else w for w in (gate_up, down)]
        for tokens in (1, 2, 5, 40, 300):
            u = randn(tokens, LATENT, dtype=BF16, scale=size.get(form, 1.0))
            for kind, idx in (
                ("spread", routes(tokens, 8)),
                ("one takes all", torch.full((tokens, 1), 3, device=CUDA)),
                ("none here", torch.full((tokens, 2), 9, device=CUDA)),
            ):
                yield Check(
                    f"experts, {form}, {tokens} tokens, {kind}",
                    lambda u=u, idx=idx, w=(gate_up, down): [gpu_ops.expert_rows(u, idx, *w)[:4].float()],
                    lambda u=u, idx=idx, w=exact: [reference.expert_rows(u[:4].float(), idx[:4], *w)],
                    ROUNDED,
                )


def piece_checks() -> Iterator[Check]:
    """What stands between products."""
    gain, scale = Gain(torch.rand(HIDDEN, device=CUDA)), Gain(torch.rand(HIDDEN, device=CUDA) + 0.5)
    mix, small = Mix(*torch.rand(2, HIDDEN, device=CUDA)), Gain(torch.rand(LATENT, device=CUDA) + 0.5)
    for tokens in (1, 3, 64, 4096):
        h, branch = randn(1, tokens, HIDDEN), randn(8, 1, tokens, HIDDEN // 8, dtype=BF16)
        for name, args, bound in (
            ("join, float32", (h, branch, None, mix, gain, EPS, EPS, torch.float32), EXACT),
            ("join, bfloat16", (h, branch, scale, mix, gain, EPS, EPS, BF16), ROUNDED),
            ("join, no norm", (h, branch, scale, mix, None, EPS, EPS, BF16), EXACT),
        ):
            found, wanted = (partial(joined_by, form, args) for form in (gpu_ops.join, pieces.join))
            yield Check(f"{name}, {tokens}", found, wanted, bound)
        rows, weight = randn(tokens, TOP_K, LATENT, dtype=BF16), torch.rand(tokens, TOP_K, device=CUDA)
        yield Check(
            f"blend, {tokens}",
            lambda y=rows, w=weight: [gpu_ops.blend(y, w, small, EPS, torch.float32)],
            lambda y=rows, w=weight: [pieces.blend(y, w, small, EPS, torch.float32)],
            EXACT,
        )
        q, k, v = (randn(1, tokens, n * HEAD_DIM, dtype=BF16) for n in (HEADS, KV_HEADS, KV_HEADS))
        pos = torch.arange(tokens, device=CUDA)[None] + 7
        for rotary in (rotary_angles(pos, HEAD_DIM, 5e5), None):
            for dtype in (BF16, torch.float8_e4m3fn):
                args = (q, k, v, rotary, dtype, pos.flatten())
                yield Check(f"place, {dtype}, {tokens}", partial(placed, gpu_ops.place, *args),
                            partial(placed, pieces.place, *args), 2**-3 if dtype != BF16 else ROUNDED)  # fmt: skip
        o, gate = randn(1, tokens, HEADS, HEAD_DIM, dtype=BF16), randn(1, tokens, HEADS * HEAD_DIM, dtype=BF16)
        yield Check(
            f"gated, {tokens}",
            lambda o=o, g=gate: [gpu_ops.gated(o, g, EPS, BF16)],
            lambda o=o, g=gate: [pieces.gated(o, g, EPS, BF16)],
            ROUNDED,
        )
        args = (randn(tokens, 256), randn(256, scale=0.1), TOP_K, 1.0, 2.5, randn(8, tokens, LATENT // 8, dtype=BF16))
        for what, bound in (("routes", EXACT), ("u", ROUNDED)):
            yield Check(f"choose, {what}, {tokens}", partial(chosen_by, gpu_ops.choose, what, *args, small, EPS, BF16),
                        partial(chosen_by, pieces.choose, what, *args, small, EPS, BF16), bound)  # fmt: skip


def joined_by(form: Callable[..., Joined], args: tuple[Any, ...]) -> list[Tensor]:
    """The stream and what the next branch starts from, which is what its rounded copy is a copy of."""
    h, a, rounded = form(*args)
    assert not isinstance(rounded, Tensor) or torch.equal(rounded, a.to(BF16))
    return [h, a]


def chosen_by(form: Callable[..., Chosen], what: str, *args: object) -> list[Tensor]:
    """The routes, or what goes into the experts."""
    found = form(*args)
    return [x.float() for x in found.routes] if what == "routes" else [found.u_TM]


def placed(form: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, rotary: object, dtype: torch.dtype,
           rows: Tensor) -> list[Tensor]:  # fmt: skip
    """Queries, and arenas after a write."""
    arenas = [torch.zeros(len(rows) // 16 + 3, 16, KV_HEADS, HEAD_DIM, device=CUDA).to(dtype) for _ in "kv"]
    out = form(q, k, v, rotary, 1.3, EPS, *arenas, rows)
    return [x.float() for x in (out, *arenas)]


def attention_checks() -> Iterator[Check]:
    """Few queries and many, ragged sequences, windows, blocks in any order, what lies in block 0 never seen."""
    cases = ((1, 1, 16, 0), (3, 1, 40, 2048), (2, 4, 50, 100), (1, 300, 40, 0), (1, 2048, 32, 2048), (2, 500, 20, 200))
    for batch, new, columns, window in cases:
        for dtype in (BF16, torch.float32, torch.float8_e4m3fn):
            keys, shape = columns * BLOCK, (batch * columns + 1, BLOCK, KV_HEADS, HEAD_DIM)
            arenas = [torch.randn(shape, device=CUDA).to(dtype) for _ in "kv"]
            if dtype != torch.float8_e4m3fn:
                for arena in arenas:
                    arena[0] = torch.nan
            blocks = (1 + torch.randperm(batch * columns, device=CUDA)).view(batch, columns)
            past = keys - new - torch.arange(batch, device=CUDA) * 37 - 5
            q_pos = past[:, None] + torch.arange(new, device=CUDA)
            k_pos = torch.arange(keys, device=CUDA).expand(batch, keys)
            k_pos = torch.where(k_pos < (past + new)[:, None], k_pos, -1)
            q = randn(batch, new, HEADS, HEAD_DIM, dtype=torch.float32 if dtype == torch.float32 else BF16)
            args = (q, *arenas, blocks, q_pos, k_pos, window)
            yield Check(
                f"attention, {batch} x {new} on {columns} blocks, window {window}, {dtype}",
                lambda args=args: [gpu_ops.attend_blocks(*args)],
                lambda args=args: [reference.attend_blocks(*args)],
                EXACT if dtype == torch.float32 else 2**-5,
            )
            if new == 1:
                column = (q_pos // BLOCK).clamp_min(0)
                write = (blocks.gather(1, column) * BLOCK + q_pos % BLOCK).flatten()
                given = (batch, q.dtype, arenas, Context(write, blocks, q_pos, k_pos, window))
                yield Check(
                    f"new tokens, {batch} on {columns} blocks, window {window}, {dtype}",
                    partial(new_tokens, gpu_ops.attend_new, *given),
                    partial(new_tokens, one_after_the_other, *given),
                    10 * EXACT if dtype == torch.float32 else 2**-5,
                )


def new_tokens(form: AttendNew, batch: int, dtype: torch.dtype, arenas: list[Tensor], at: Context) -> list[Tensor]:
    """Gated heads, and what was written."""
    rotary = rotary_angles(at.q_pos_BT, HEAD_DIM, 5e5) if at.window else None  # older than the rows, as in a step
    draw, copies = torch.Generator(CUDA).manual_seed(batch), [x.clone() for x in arenas]
    sizes = [n * HEAD_DIM for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    wide = torch.randn(batch, 1, sum(sizes), device=CUDA, generator=draw).to(dtype)
    out = form(Projected(*wide.split(sizes, -1)), rotary, 1.3, EPS, copies[0], copies[1], at, dtype)
    return [out.float(), *[x.flatten(0, 1)[at.write].float() for x in copies]]


def one_after_the_other(
    rows: Projected,
    rotary: Rotary | None,
    qk_scale: float,
    eps: float,
    k_arena: Tensor,
    v_arena: Tensor,
    at: Context,
    dtype: torch.dtype,
) -> Tensor:
    """What `Ops.attend_new` does, by the plain forms."""
    q = pieces.place(*rows[:3], rotary, qk_scale, eps, k_arena, v_arena, at.write)
    return pieces.gated(reference.attend_blocks(q, k_arena, v_arena, *at[1:]), rows.gate_BTF, eps, dtype)


def other_checks() -> Iterator[Check]:
    """Products of few rows, the router's against float64, and the draw."""
    for tokens in (1, 2, 4, 16, 17, 4096):
        x, ws = randn(tokens, HIDDEN), [randn(256, HIDDEN, scale=0.01), randn(512, HIDDEN, dtype=BF16, scale=0.01)]
        yield Check(f"linears, {tokens}", lambda x=x, ws=ws: [y.float() for y in gpu_ops.linears(x, ws)],
                    lambda x=x, ws=ws: [reference.linear(x, w).float() for w in ws], ROUNDED)  # fmt: skip
        yield Check(f"router, {tokens}", lambda x=x, w=ws[0]: [gpu_ops.linear(x, w)],
                    lambda x=x, w=ws[0]: [(x.double() @ w.double().T).float()], EXACT / 4)  # fmt: skip
    for rows, filtered in ((1, False), (5, False), (64, False), (1, True), (5, True), (64, True)):
        logits, pos = randn(rows, 25_256, scale=3.0), torch.arange(rows, device=CUDA)
        on = draws(settings := rules(rows, filtered), 25_256, "cuda")
        yield Check(
            f"draw, {rows}, {'filtered' if filtered else 'all'}",
            lambda z=logits, d=on, p=pos, f=filtered: [sample(z, d, p, filtered=f).float()],
            lambda z=logits, s=settings, p=pos, f=filtered: [
                sample(z.cpu(), draws(s, 25_256), p.cpu(), filtered=f).float().to(CUDA)
            ],
            0.0,
        )


def rules(rows: int, filtered: bool) -> list[Sampling]:
    """Greedy rows and others, these with every filter in turn."""
    one_each: list[dict[str, Any]] = [{"top_k": 64}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.95}]
    limits = one_each if filtered else [{}]
    return [Sampling(0.8 * (n % 3 > 0), seed=n, **limits[n % len(limits)]) for n in range(rows)]


def differences(checks: Iterator[Check]) -> Iterator[tuple[str, float, bool]]:
    """Of each check its name, the difference relative to the largest, and whether it is within its bound twice."""
    for check in checks:
        pairs = [(a.float(), b.float()) for a, b in zip(check.found(), check.wanted(), strict=True)]
        again = [(a.float(), b) for a, (b, _) in zip(check.found(), pairs, strict=True)]
        error = max(
            ((a.float() - b.float()).abs().max() / b.float().abs().max().clamp_min(1e-30)).item() for a, b in pairs
        )
        yield check.name, error, error <= check.bound and all(torch.equal(a, b) for a, b in again)


CHECKS = {"experts": expert_checks, "pieces": piece_checks, "attention": attention_checks, "linear": other_checks}
