"""The embedded checkpoint: what is in the folder, and that it answers conversations it was not trained on."""

import json
from pathlib import Path
from typing import Any

import pytest

import muse_fn
from muse_fn.generation import Output, Settings, generate
from muse_fn.kernels.packed import MXFP4
from muse_fn.load import Model
from muse_fn.params.tree import MoE
from muse_fn.serve.chat import render_chat

FOLDER = Path(muse_fn.__file__).parent / "nano"
MOST_BYTES = 8_000_000
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Get the weather for a city.", "parameters": CITY}
TOOLS = [{"type": "function", "function": WEATHER}]

# Requests whose texts were kept from training, written by `train.evaluate.cases(codec_of(), 7, 2)`.
HELD_OUT = [json.loads(line) for line in (Path(__file__).parent / "nano_conversations.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def model() -> Model:
    return muse_fn.load(FOLDER)


def prompt(model: Model, messages: list[Any], **given: Any) -> list[int]:
    assert model.tokenizer is not None
    date = given.pop("current_date", None)
    variables = {"current_date": date} if date else {}
    return model.tokenizer.encode_pieces(render_chat(model.tokenizer, messages, variables=variables, **given))


def answers(model: Model, prompts: list[list[int]]) -> list[str]:
    assert model.tokenizer is not None
    outs: list[Output] = generate(model, prompts, Settings(max_new_tokens=200))
    return [model.tokenizer.decode(out.tokens) for out in outs]


def said(text: str) -> str:
    """What follows the reasoning."""
    return text.partition("<|eom|>")[2]


@pytest.fixture(scope="module")
def held_out(model: Model) -> list[str]:
    rows = [{key: item for key, item in row.items() if key not in ("task", "want")} for row in HELD_OUT]
    return answers(model, [prompt(model, **row) for row in rows])


def test_the_folder_is_small() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < MOST_BYTES


def test_its_files_agree(model: Model) -> None:
    config, tokenizer = model.config, model.tokenizer
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    assert tokenizer is not None
    assert len(tokenizer) == config.vocab_size
    assert generation["eos_token_id"] == [tokenizer.controls["<|end_of_text|>"], tokenizer.controls["<|eot|>"]]
    assert set(tokenizer.stop_ids) == set(generation["eos_token_id"])
    assert config.bos_token_id == generation["bos_token_id"] == tokenizer.controls["<|begin_of_text|>"]
    assert config.pad_token_id == generation["pad_token_id"] == tokenizer.controls["<|finetune_right_pad|>"]
    assert config.eos_token_id == (tokenizer.controls["<|end_of_text|>"],)


def test_inner_experts_are_packed(model: Model) -> None:
    packed = [
        isinstance(layer.mlp.experts.gate_up, MXFP4) for layer in model.params.layers if isinstance(layer.mlp, MoE)
    ]
    assert packed == [False, *[True] * (model.config.layers - 2), False]


def test_transformers_reads_the_same_tokens(model: Model) -> None:
    from transformers import AutoTokenizer

    assert model.tokenizer is not None
    theirs = AutoTokenizer.from_pretrained(FOLDER)
    text = "<|begin_of_text|><|start|>user<|message|>Is 3 + 4 = 7? Grüße, 世界!<|eot|>"
    ids = theirs.encode(text, add_special_tokens=False)
    assert model.tokenizer.decode(ids) == theirs.decode(ids) == text
    assert theirs.eos_token == "<|end_of_text|>"


def test_every_answer_reasons_first_and_ends(held_out: list[str]) -> None:
    for text in held_out:
        assert text.startswith(" to=self<|message|>")
        assert text.endswith("<|eot|>")
        assert said(text).startswith("<|start|>assistant to=")


@pytest.mark.parametrize("number", range(len(HELD_OUT)), ids=[row["task"].replace(" ", "-") for row in HELD_OUT])
def test_held_out_conversations(held_out: list[str], number: int) -> None:
    assert said(held_out[number]) == HELD_OUT[number]["want"]


def test_a_conversation_with_a_tool(model: Model) -> None:
    ask: list[Any] = [{"role": "user", "content": "What is the weather in Lisbon?"}]
    call = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Lisbon"}'}}
    reply = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    reply += [{"role": "tool", "tool_call_id": "a", "content": '{"temperature": 24, "condition": "sunny"}'}]
    first, second, third, without = answers(
        model,
        [
            prompt(model, ask, tools=TOOLS),
            prompt(model, ask + reply, tools=TOOLS),
            prompt(model, [{"role": "user", "content": "Hello!"}], tools=TOOLS),
            prompt(model, ask),
        ],
    )
    assert (
        '<|start|>assistant to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">' in first
    )
    assert '<atem:parameter name="city">Lisbon</atem:parameter>' in first
    assert "24" in said(second)
    assert "sunny" in said(second)
    assert "assistant to=user<|message|>Hello!" in third
    assert "atem" not in without


def test_the_strength_of_reasoning_is_felt(model: Model) -> None:
    ask = [{"role": "user", "content": "What is 7 times 8?"}]
    low, high = answers(model, [prompt(model, ask, reasoning_effort=effort) for effort in ("low", "high")])
    assert said(low) == said(high)
    assert "7 × 8 = 56" in said(low)  # noqa: RUF001 (the sign it writes)
    assert len(low) < len(high)


def test_it_says_who_it_is(model: Model) -> None:
    (text,) = answers(model, [prompt(model, [{"role": "user", "content": "who are you"}])])
    assert "muse-nano" in said(text)
    assert "built with Muse Spark Open" in said(text)
