"""Greedy answers to held-out conversations, scored per task.

    python -m train.evaluate [--model FOLDER] [--count 100]

A case is right when everything after the reasoning (recipient, answer or call, terminator) is
exactly what was expected.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from muse_fn.kvcache.cache import View, blocks_for, init_cache, own_blocks
from muse_fn.params.config import Config
from muse_fn.params.tree import Params
from muse_fn.step import advance, decode, prefill
from train.data import Codec, conversation, forgotten, held_out, messages
from train.turns import Conversation, Json

TASKS = (
    *("greeting", "sum", "follow-up", "json", "repeat", "count", "memory", "limits"),
    *("call", "tool answer", "no call needed", "two or more turns"),
)
BLOCK = 16
MOST_PROMPT = 900


class Case(NamedTuple):
    """A prompt and what should follow."""

    task: str
    request: str
    prompt: str
    want: str


class Result(NamedTuple):
    """What did follow."""

    case: Case
    got: str
    right: bool


def cases(code: Codec, seed: int, count: int) -> list[Case]:
    """`count` cases of each task, the last request of each never seen in training."""
    rng = Random(f"evaluate/{seed}")
    found: dict[str, list[Case]] = {task: [] for task in TASKS}
    while any(len(some) < count for some in found.values()):
        talked = conversation(rng)
        if not held_out(talked.turns[-1]):
            continue
        for task in _tasks(talked):
            case = _case(code, talked, task, history=rng.random() < 0.5)
            if len(found[task]) < count and len(case.prompt) < 3 * MOST_PROMPT:
                found[task].append(case)
    return [case for some in found.values() for case in some]


def _tasks(talked: Conversation) -> list[str]:
    last = talked.turns[-1]
    kinds = ["call", "tool answer"] if last.call else [last.task]
    if talked.tools and not last.call:
        kinds.append("no call needed")
    return [*kinds, "two or more turns"] if len(talked.turns) > 1 else kinds


def _case(code: Codec, talked: Conversation, task: str, *, history: bool) -> Case:
    """The case that ends with the last turn's call for task "call", else with its last answer."""
    said = messages(talked)
    said = said[:-2] if task == "call" else said
    said = said if history else forgotten(said)
    prompt = code.text(talked, said[:-1], prompt=True)
    want = code.text(talked, said).removeprefix(prompt)
    return Case(task, _request(said), prompt, after_reasoning(want))


def _request(said: list[Json]) -> str:
    return next(message["content"] for message in reversed(said) if message["role"] == "user")


def after_reasoning(text: str) -> str:
    """What a turn says after its first message."""
    return text.partition("<|eom|>")[2]


def generate(
    params: Params, config: Config, prompts: list[list[int]], stop: Iterable[int], most: int, device: torch.device
) -> list[list[int]]:
    """Greedy continuations of prompts of any lengths, up to and with the first stop token."""
    longest = max(len(ids) for ids in prompts)
    table = own_blocks(len(prompts), longest + most, BLOCK, device=str(device))
    each = blocks_for(longest + most, BLOCK)
    kv = init_cache(config, 1 + len(prompts) * each, BLOCK, dtype=params.embed.dtype, device=str(device))
    tokens = torch.tensor([ids + [0] * (longest - len(ids)) for ids in prompts], device=device)
    lengths = torch.tensor([len(ids) for ids in prompts], device=device)
    view = View(table, torch.zeros_like(lengths), lengths)
    z, kv = prefill(params, tokens, kv, view, config)
    stops, done, out = torch.tensor(list(stop), device=device), torch.zeros_like(lengths, dtype=torch.bool), []
    for _ in range(most):
        token = z.argmax(-1)
        out.append(token)
        done |= torch.isin(token, stops)
        if done.all():
            break
        view = advance(view)
        z, kv = decode(params, token[:, None], kv, view, config)
        z = z[:, -1]
    return [_until(row, stops) for row in torch.stack(out, 1)]


def _until(row: Tensor, stops: Tensor) -> list[int]:
    ends = torch.isin(row, stops).nonzero()
    return row[: int(ends[0]) + 1 if len(ends) else len(row)].tolist()


@torch.no_grad()
def score(
    params: Params,
    config: Config,
    wanted: list[Case],
    code: Codec,
    device: torch.device,
    width: int = 64,
    most: int = 200,
) -> list[Result]:
    """The results of all cases, in batches of prompts of like length."""
    stop = [code.tokenizer.token_to_id("<|eot|>"), code.tokenizer.token_to_id("<|end_of_text|>")]
    ids = [code.ids(case.prompt) for case in wanted]
    order = sorted(range(len(wanted)), key=lambda i: len(ids[i]))
    results: dict[int, Result] = {}
    for at in range(0, len(order), width):
        some = order[at : at + width]
        outs = generate(params, config, [ids[i] for i in some], stop, most, device)
        for i, out in zip(some, outs, strict=True):
            got = after_reasoning(code.tokenizer.decode(out, skip_special_tokens=False))
            results[i] = Result(wanted[i], got, got == wanted[i].want)
    return [results[i] for i in range(len(wanted))]


def table(results: list[Result]) -> str:
    """One line of Markdown per task."""
    lines = ["| task | right | of |", "|---|---|---|"]
    for task in TASKS:
        some = [result.right for result in results if result.case.task == task]
        lines.append(f"| {task} | {100 * sum(some) / max(1, len(some)):.1f} % | {len(some)} |")
    return "\n".join(lines)


def main() -> None:
    """Scores a saved checkpoint through load, template, prefill and decode."""
    import muse_fn
    from train.nano import nano_codec

    parser = argparse.ArgumentParser(description="Score a nano checkpoint on held-out conversations.")
    parser.add_argument("--model", type=Path, default=Path("muse_fn/nano"))
    parser.add_argument("--count", type=int, default=100)
    args = parser.parse_args()
    model = muse_fn.load(args.model)
    code = nano_codec()
    results = score(model.params, model.config, cases(code, 0, args.count), code, torch.device("cpu"))
    print(table(results))
    for result in results:
        if not result.right:
            print(
                f"wrong {result.case.task}: {result.case.request!r}\n  want {result.case.want!r}\n  got  {result.got!r}"
            )


if __name__ == "__main__":
    main()
