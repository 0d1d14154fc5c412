"""Greedy answers to held-out conversations, scored per task.

    python -m train.evaluate [--model FOLDER] [--count 100]

A case is right when everything after the reasoning (recipient, answer or call, terminator) is
exactly what was expected.
"""

import argparse
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, cast

from muse_fn.generation import Settings, generate
from muse_fn.load import Model, load
from muse_fn.serve.chat import render_chat
from train.data import FOLDER, Codec, codec_of, conversation, forgotten, held_out, messages
from train.turns import Conversation, Json

TASKS = (
    *("greeting", "sum", "follow-up", "json", "repeat", "count", "memory", "limits"),
    *("call", "tool answer", "no call needed", "two or more turns"),
)
WIDTH = 64  # prompts in a batch
MOST_PROMPT = 2700  # characters
MOST_ANSWER = 200  # tokens


class Case(NamedTuple):
    """A prompt and what should follow."""

    task: str
    request: str
    talked: Conversation
    said: list[Json]  # the messages of the prompt
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
            if len(found[task]) < count and len(case.prompt) < MOST_PROMPT:
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
    return Case(task, _request(said), talked, said[:-1], prompt, after_reasoning(want))


def _request(said: list[Json]) -> str:
    return next(message["content"] for message in reversed(said) if message["role"] == "user")


def after_reasoning(text: str) -> str:
    """What a turn says after its first message."""
    return text.partition("<|eom|>")[2]


def score(model: Model, wanted: list[Case], prompts: list[list[int]], code: Codec) -> list[Result]:
    """The results of all cases, greedily, in batches of prompts of like length."""
    settings = Settings(max_new_tokens=MOST_ANSWER, stop_tokens=code.stops())
    order = sorted(range(len(wanted)), key=lambda i: len(prompts[i]))
    results: dict[int, Result] = {}
    for at in range(0, len(order), WIDTH):
        some = order[at : at + WIDTH]
        for i, out in zip(some, generate(model, [prompts[i] for i in some], settings), strict=True):
            got = after_reasoning(code.tokenizer.decode(list(out.tokens), skip_special_tokens=False))
            results[i] = Result(wanted[i], got, got == wanted[i].want)
    return [results[i] for i in range(len(wanted))]


def table(results: list[Result]) -> str:
    """One line of Markdown per task."""
    lines = ["| task | right | of |", "|---|---|---|"]
    for task in TASKS:
        some = [result.right for result in results if result.case.task == task]
        lines.append(f"| {task} | {100 * sum(some) / max(1, len(some)):.1f} % | {len(some)} |")
    return "\n".join(lines)


def report(results: list[Result], most: int = 20) -> str:
    """The table, then what went wrong."""
    wrong = [r for r in results if not r.right][:most]
    told = [f"wrong {r.case.task}: {r.case.request!r}\n  want {r.case.want!r}\n  got  {r.got!r}" for r in wrong]
    return "\n".join([table(results), *told])


def served(model: Model, case: Case) -> list[int]:
    """The prompt's tokens as the server makes them."""
    assert model.tokenizer is not None
    talked = case.talked
    variables: dict[str, Any] = {"current_date": talked.date} if talked.date else {}
    pieces = render_chat(
        model.tokenizer,
        cast("Any", case.said),
        tools=cast("Any", list(talked.tools) or None),
        reasoning_effort=talked.effort,
        variables=variables,
    )
    return model.tokenizer.encode_pieces(pieces)


def main() -> None:
    """Scores a saved checkpoint: load, render, prefill, decode as the server does them."""
    parser = argparse.ArgumentParser(description="Score a nano checkpoint on held-out conversations.")
    parser.add_argument("--model", type=Path, default=FOLDER)
    parser.add_argument("--count", type=int, default=100, help="conversations per task")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    model, code = load(args.model), codec_of(args.model)
    wanted = cases(code, args.seed, args.count)
    print(report(score(model, wanted, [served(model, case) for case in wanted], code)))


if __name__ == "__main__":
    main()
