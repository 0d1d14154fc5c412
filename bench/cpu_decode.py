"""Prefill and decode on a CPU: ours and transformers in one run, beside the floor that the machine sets.

    python bench/cpu_decode.py [--repeats 7] [--save]

Both sides hold the same bfloat16 weights and the timing starts only after their logits agree. Each repeat times every
case once on each side, in turn, so that a slow moment of the machine falls on both. The floor of a decode step is the
bytes it must read over the best read rate seen in this run; the floor of a prefill is its products over the best
bfloat16 matrix rate. Nothing here asserts a time.
"""

import argparse
import copy
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from muse_fn.decoder import Scales, prepared
from muse_fn.kernels.select import select
from muse_fn.kvcache.cache import KVCache, View, init_cache, own_blocks
from muse_fn.params.config import Config
from muse_fn.params.quantise import quantise_experts
from muse_fn.params.schema import leaves, sparse_layers
from muse_fn.params.tree import Params, from_named, map_tensors, named, sample_tensor
from muse_fn.step import advance, decode, prefill
from muse_fn.unpacking import unpacked

MID = Config(
    vocab_size=32_768,
    hidden_size=1024,
    intermediate_size=2048,
    layers=8,
    heads=16,
    kv_heads=4,
    head_dim=64,
    latent_size=512,
    expert_size=512,
    experts=32,
    top_k=4,
    window=512,
    max_positions=4096,
    bos_token_id=0,
    eos_token_id=(1,),
)
# Their towers are built too; as small as they go, and never run.
VISION = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "patch_size": 2}
AUDIO = {"patch_sizes": [2], "hidden_sizes": [8], "depths": [1], "num_hidden_layers": 1}
BF16 = torch.bfloat16
BLOCK = 16
# Rounding to bfloat16 decides near ties between experts differently on each side, so the two are not compared with
# each other alone but with the same weights in float32: ours may be no further from it than theirs, and a margin.
ERROR_MARGIN = 1.25


@dataclass(frozen=True)
class Case:
    """One row of the table: `new` tokens for each of `batch` sequences, after `past` positions."""

    name: str
    batch: int
    past: int
    new: int
    bytes_floor: float  # per step
    flops: float  # per step


@dataclass(frozen=True)
class Timing:
    """Seconds per step, one entry per repeat."""

    ours: list[float]
    theirs: list[float]


def their_model(config: Config) -> Any:
    """transformers' model of this config in bfloat16, as from_pretrained would place the dtypes, random weights."""
    from transformers import MuseSparkConfig, MuseSparkForConditionalGeneration

    whole: Any = MuseSparkConfig(
        text_config=config.to_json(),
        vision_config=dict(VISION),
        audio_config={**AUDIO, "out_hidden_size": config.hidden_size},
        out_hidden_size=16,
        projector_hidden_size=16,
    )
    torch.manual_seed(0)
    forms = {"attn_implementation": "sdpa", "experts_implementation": "grouped_mm"}
    model: Any = MuseSparkForConditionalGeneration._from_config(whole, **forms)  # pyright: ignore[reportPrivateUsage]
    model = model.to(BF16).eval()
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if any(part in name for part in model._keep_in_fp32_modules_strict):
            value.data = value.data.float()
        if "residual_gate" in name:  # branches of 5 to 20 % of the stream: at 50 % one rounding decides every logit
            value.data.uniform_(-0.9, -0.5)
    return model


def our_params(config: Config, state: dict[str, Tensor]) -> Params:
    """Our tree over a published state dict, through the schema; shares its memory."""
    return from_named(sparse_layers(config), {leaf.path: state[leaf.name] for leaf in leaves(config)})


def our_prefill(params: Params, tokens: Tensor, config: Config, room: int) -> tuple[Tensor, KVCache, View]:
    """Logits of the last position, and a cache with `room` positions more."""
    batch, length = tokens.shape
    table = own_blocks(config, batch, length + room, BLOCK)
    kv = init_cache(config, 1 + table.numel(), BLOCK, dtype=sample_tensor(params).dtype)
    count = torch.full((batch,), length)
    view = View(table, torch.zeros_like(count), count)
    out, kv = prefill(params, tokens, kv, view, config)
    return out, kv, advance(view)


def our_decode(
    params: Params,
    config: Config,
    token: Tensor,
    kv: KVCache,
    view: View,
    steps: int,
    every: tuple[Scales, ...] = (),
) -> Tensor:
    """Greedy tokens [B, steps]."""
    made: list[Tensor] = []
    for _ in range(steps):
        out, kv = decode(params, token, kv, view, config, every=every)
        token, view = out[:, -1].argmax(-1, keepdim=True), advance(view)
        made.append(token)
    return torch.cat(made, 1)


def their_prefill(model: Any, tokens: Tensor) -> tuple[Tensor, Any]:
    """Logits of the last position, and their default cache."""
    out = model(input_ids=tokens, use_cache=True, logits_to_keep=1)
    return out.logits[:, -1], out.cache


def their_decode(model: Any, token: Tensor, cache: Any, steps: int) -> Tensor:
    """Greedy tokens [B, steps]."""
    made: list[Tensor] = []
    for _ in range(steps):
        out = model(input_ids=token, cache=cache, use_cache=True)
        token = out.logits[:, -1].argmax(-1, keepdim=True)
        made.append(token)
    return torch.cat(made, 1)


def check(model: Any, params: Params, config: Config, tokens: Tensor) -> str:
    """One sentence on how well both sides agree. Raises ValueError if ours is worse than bfloat16 explains."""
    steps = 4
    exact_params = map_tensors(Tensor.float, params)

    def ours(params: Params) -> Tensor:
        first, kv, view = our_prefill(params, tokens[:, :-steps], config, steps)
        rest, _ = decode(
            params, tokens[:, -steps:], kv, view._replace(count_B=torch.full_like(view.count_B, steps)), config
        )
        return torch.cat([first[:, None], rest], 1)

    first, cache = their_prefill(model, tokens[:, :-steps])
    rest = model(input_ids=tokens[:, -steps:], cache=cache, use_cache=True).logits
    theirs = torch.cat([first[:, None], rest], 1).float()
    exact, mine = ours(exact_params), ours(params)
    size = exact.pow(2).mean().sqrt()
    a, b, c = ((x - y).pow(2).mean().sqrt() / size for x, y in ((mine, exact), (theirs, exact), (mine, theirs)))
    words = f"RMS error of the logits against float32: ours {a:.2%}, transformers {b:.2%}; between them {c:.2%}."
    if not a <= ERROR_MARGIN * b:
        raise ValueError(f"our logits are wrong, nothing to time. {words}")
    return words


def cases(config: Config, context: int, steps: int) -> list[Case]:
    """The rows of the table with their floors."""
    prompt = Case("prefill", 1, 0, context, step_bytes(config, 1, 0, context), step_flops(config, context))
    middle = context + steps // 2
    return [prompt, *(Case(f"decode, batch {b}", b, middle, 1, step_bytes(config, b, middle, 1), 0.0) for b in (1, 8))]


def step_bytes(config: Config, batch: int, past: int, new: int) -> float:
    """Bytes one step must read: every weight outside the experts once, each expert that uniform routing is expected to
    touch once, the keys and values each layer sees. Rows of the embedding and all writes are left out."""
    each = {leaf.path: leaf.size * (4 if leaf.row.dtype == "float32" else 2) for leaf in leaves(config)}
    experts = sum(n for path, n in each.items() if path.endswith(("gate_up", "down")) and ".experts." in path)
    others = sum(each.values()) - experts - each["embed"]
    touched = 1 - (1 - config.top_k / config.experts) ** (batch * new)
    seen = sum(min(past, config.window) if config.is_sliding(i) else past for i in range(config.layers))
    return others + experts * touched + batch * seen * config.kv_heads * config.head_dim * 2 * 2


def step_flops(config: Config, length: int) -> float:
    """Operations of the products of a prefill whose logits are needed at the last position only."""
    per_token = 0
    for leaf in leaves(config):
        if len(leaf.shape) > 1 and leaf.layer is not None:
            per_token += leaf.size * config.top_k // config.experts if ".experts." in leaf.path else leaf.size
    pairs = length * (length + 1) // 2
    attention = config.layers * pairs * config.heads * config.head_dim * 2
    return 2.0 * (per_token * length + attention + config.vocab_size * config.hidden_size)


def read_rate() -> float:
    """Best bytes per second seen while reading an array once that no cache of the machine keeps for us."""
    big = torch.randn(192 << 10, 1024).to(BF16)  # 384 MiB
    few = torch.randn(4, 1024).to(BF16)
    probes: list[Callable[[], Tensor]] = [
        lambda: F.linear(big, few),
        lambda: torch.mv(big, few[0]),
        lambda: select(big.device).linear(few[:1], big),
        lambda: big.view(torch.float32).sum(),
    ]
    return max(big.nbytes / seconds(probe) for probe in probes for _ in range(5))


def matrix_rate() -> float:
    """Best bfloat16 operations per second of a large product."""
    a, b = torch.randn(2, 2048, 2048).to(BF16)
    return max(2 * 2048**3 / seconds(lambda: a @ b) for _ in range(8))


def seconds(fn: Callable[[], object]) -> float:
    """Wall-clock of one call."""
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def measure(model: Any, params: Params, config: Config, case: Case, args: argparse.Namespace) -> Iterator[Timing]:
    """Times one case again and again, both sides in turn; yields what is known so far."""
    tokens = torch.randint(2, config.vocab_size, (case.batch, args.context), generator=torch.Generator().manual_seed(1))
    result = Timing([], [])
    every = prepared(params, config)  # for all steps, as their model is when it is built
    first, kv, view = our_prefill(params, tokens, config, args.steps)
    theirs_first, kept = their_prefill(model, tokens)
    token, theirs_token = first.argmax(-1, keepdim=True), theirs_first.argmax(-1, keepdim=True)
    for repeat in range(args.repeats + 1):
        if case.past == 0:
            mine = seconds(lambda: our_prefill(params, tokens, config, args.steps))
            theirs = seconds(lambda: their_prefill(model, tokens))
        else:
            cache, own = copy.deepcopy((kept, kv))  # a step consumes both
            mine = seconds(lambda own=own: our_decode(params, config, token, own, view, args.steps, every)) / args.steps
            theirs = seconds(lambda cache=cache: their_decode(model, theirs_token, cache, args.steps)) / args.steps
        if repeat:  # the first warms up
            result.ours.append(mine)
            result.theirs.append(theirs)
            yield result


def packed_lines(params: Params, config: Config, args: argparse.Namespace) -> Iterator[str]:
    """Decode steps and prefill with experts in MXFP4, packed and unpacked while loading, beside those in bfloat16, in
    turn."""
    packed = quantise_experts(params, config)
    values = named(packed)
    plain = {leaf.path: unpacked(leaf, values[leaf.path], BF16) for leaf in leaves(config)}
    forms = {"bfloat16": params, "packed": packed, "unpacked": from_named(sparse_layers(config), plain)}
    yield "Experts in MXFP4, milliseconds of a prefill and of a decode step (median):"
    tokens = torch.randint(2, config.vocab_size, (1, args.context), generator=torch.Generator().manual_seed(1))
    every = {name: prepared(tree, config) for name, tree in forms.items()}
    spent: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(args.repeats + 1):  # the first warms up
        for name, tree in forms.items():
            spent[name].append(seconds(partial(our_prefill, tree, tokens, config, args.steps)))
    yield f"prefill: {told(spent)}."
    for batch in (1, 8):
        tokens = torch.randint(2, config.vocab_size, (batch, args.context), generator=torch.Generator().manual_seed(1))
        begun = {name: our_prefill(tree, tokens, config, args.steps) for name, tree in forms.items()}
        spent = {name: [] for name in forms}
        for _ in range(args.repeats + 1):
            for name, tree in forms.items():
                first, kv, view = copy.deepcopy(begun[name])
                token = first.argmax(-1, keepdim=True)
                run = partial(our_decode, tree, config, token, kv, view, args.steps, every[name])
                spent[name].append(seconds(run) / args.steps)
        yield f"batch {batch}: {told(spent)}."


def told(spent: dict[str, list[float]]) -> str:
    """Medians in milliseconds, without the first of each."""
    return ", ".join(f"{name} {statistics.median(times[1:]) * 1e3:.1f}" for name, times in spent.items())


HEADER = (
    "| case | ours, tokens/s (best) | transformers (best) | ratio (best) | ours, ms | floor, ms | / floor | achieved |",
    "|---|---|---|---|---|---|---|---|",
)


def row(case: Case, timing: Timing, read: float, rate: float) -> str:
    """A line of the table from medians; in parentheses the best repeat."""
    tokens = case.batch * case.new
    mine, theirs = statistics.median(timing.ours), statistics.median(timing.theirs)
    floor = max(case.bytes_floor / read, case.flops / rate)
    cells = (
        case.name,
        f"{tokens / mine:,.0f} ({tokens / min(timing.ours):,.0f})",
        f"{tokens / theirs:,.0f} ({tokens / min(timing.theirs):,.0f})",
        f"{theirs / mine:.2f} ({min(timing.theirs) / min(timing.ours):.2f})",
        f"{mine * 1e3:.2f}",
        f"{floor * 1e3:.2f}",
        f"{mine / floor:.2f}",
        f"{case.flops / mine / 1e9:,.0f} GFLOP/s" if case.flops else f"{case.bytes_floor / mine / 1e9:.1f} GB/s",
    )
    return f"| {' | '.join(cells)} |"


def progress(text: str) -> None:
    """One line on stderr that is written over."""
    print(f"\r{text:<78}", end="", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="times each case is timed on each side")
    parser.add_argument("--steps", type=int, default=24, help="decode steps per repeat")
    parser.add_argument("--context", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="also write the table to bench/results/")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    config = replace(MID, max_positions=max(MID.max_positions, args.context + args.steps))

    progress("building the models")
    model = their_model(config)
    params = our_params(config, model.state_dict())
    lines = [f"# CPU decode, {date.today().isoformat()}", "", f"{machine()}, {args.threads} threads, bfloat16."]
    with torch.inference_mode():
        progress("comparing the logits")
        tokens = torch.randint(2, config.vocab_size, (2, 68), generator=torch.Generator().manual_seed(2))
        lines.append(check(model, params, config, tokens))
        progress("measuring the machine")
        read, rate = read_rate(), matrix_rate()
        table: list[tuple[Case, Timing]] = []
        for case in cases(config, args.context, args.steps):
            timing = Timing([], [])
            for timing in measure(model, params, config, case, args):
                progress(f"{case.name}: repeat {len(timing.ours)} of {args.repeats}")
            read, rate = max(read, read_rate()), max(rate, matrix_rate())
            table.append((case, timing))
        progress("experts in MXFP4")
        packed = [*packed_lines(params, config, args)]
    lines.append(f"Best read rate {read / 1e9:.1f} GB/s, best matrix rate {rate / 1e9:,.0f} GFLOP/s, in this run.")
    progress("")
    print("\r", end="", file=sys.stderr)
    report = "\n".join([*lines, "", *HEADER, *(row(c, t, read, rate) for c, t in table), "", *packed])
    print(report)
    if args.save:
        path = Path(__file__).parent / "results" / f"{date.today().isoformat()}-cpu-decode.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text(report + "\n", encoding="utf-8")
        print(f"\nsaved to {path}")


def machine() -> str:
    """What this ran on, in words."""
    import transformers  # pyright: ignore

    capability = torch.backends.cpu.get_cpu_capability()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{platform.machine()} {capability}, {versions}"


if __name__ == "__main__":
    main()
