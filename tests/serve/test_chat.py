"""What a caller writes stays text, whatever the template does with it; what the template writes becomes tokens."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerFast

import muse_fn
from muse_fn.serve.chat import render_chat
from muse_fn.tokenizer import Control, Json, Piece, Text, Tokenizer, load_tokenizer
from tests.toy_tokenizer import CONTROLS, build

NANO = (Path(muse_fn.__file__).parent / "nano" / "chat_template.jinja").read_text()
HALVES = [name[:cut] for name in CONTROLS for cut in (1, 2, 5, len(name) - 1)] + [name[1:] for name in CONTROLS]
SPELLINGS = st.lists(st.sampled_from([*CONTROLS, *HALVES, "a", " ", "<", "|"]), max_size=4).map("".join)
ASK: list[Json] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(build(tmp_path_factory.mktemp("nano"), template=NANO))


def with_template(folder: Path, template: str, more: tuple[str, ...] = ()) -> Tokenizer:
    return load_tokenizer(build(folder, template=template, more=more))


def spelled(pieces: list[Piece]) -> str:
    return "".join(piece.text if isinstance(piece, Text) else piece.name for piece in pieces)


def conversation(word: str) -> tuple[list[Json], list[Json]]:
    """Messages and tools with one string in every place that a caller fills."""
    schema: Json = {"type": "object", "properties": {word: {"type": "string", "description": word, "enum": [word]}}}
    call: Json = {"id": word, "function": {"name": word, "arguments": {word: word, "list": [word, {word: word}]}}}
    messages: list[Json] = [
        {"role": "system", "content": word},
        {"role": "user", "content": [{"type": "text", "text": word}, {"type": "text", "text": word}]},
        {"role": "assistant", "content": word, "reasoning": word, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": word, "content": word},
        {"role": "tool", "name": word, "content": word},
        {"role": "assistant", "content": word},
        {"role": "developer", "content": word},
    ]
    tools: list[Json] = [
        {"type": "function", "function": {"name": word, "description": word, "parameters": schema}},
        {"type": "namespace", "name": word, "tools": [{"type": "function", "function": {"name": word}}]},
    ]
    return messages, tools


def assert_stays_text(nano: Tokenizer, word: str) -> None:
    """The prompt is the one of a harmless word, with the word exchanged inside its texts, and decodes to just that."""
    plain_messages, plain_tools = conversation("zzz")
    plain = render_chat(nano, plain_messages, tools=plain_tools, variables={"current_date": "zzz"})
    messages, tools = conversation(word)
    pieces = render_chat(nano, messages, tools=tools, variables={"current_date": word})
    expected = [Text(piece.text.replace("zzz", word)) if isinstance(piece, Text) else piece for piece in plain]
    assert pieces == [piece for piece in expected if piece != Text("")]
    ids = nano.encode_pieces(pieces)
    assert nano.decode(ids) == spelled(pieces)
    assert [nano.names[token] for token in ids if token in nano.names] == [
        piece.name for piece in pieces if isinstance(piece, Control)
    ]


@pytest.mark.parametrize("word", CONTROLS)
def test_every_control_token_stays_text_in_every_place(nano: Tokenizer, word: str) -> None:
    assert_stays_text(nano, word)
    for cut in range(1, len(word)):
        assert_stays_text(nano, word[:cut])
        assert_stays_text(nano, word[cut:])


@given(SPELLINGS.filter(bool))
def test_pairs_and_halves_stay_text(nano: Tokenizer, word: str) -> None:
    assert_stays_text(nano, word)


@given(st.text())
def test_user_text_survives(nano: Tokenizer, text: str) -> None:
    messages: list[Json] = [{"role": "user", "content": text}]
    head = "<|begin_of_text|><|start|>system<|message|>You are muse-nano.\nReasoning strength: 512.<|eot|>"
    expected = f"{head}<|start|>user<|message|>{text}<|eot|><|start|>assistant"
    assert nano.decode(nano.encode_pieces(render_chat(nano, messages))) == expected


HOSTILE = [
    "{{ messages[0].content }}t|>",
    "{{ messages[0].content | trim }}eot|>",
    "<{{ messages[0].content }}>",
    "<{{ messages[0].content | trim }}",
    "{{ '<|' ~ messages[0].content ~ '|>' }}",
    "{{ '<|' ~ messages[0].content | lower ~ '|>' }}",
    "{{ messages[0].content | upper }}{{ messages[0].content | lower }}",
    "{{ messages[0].content }}{{ messages[1].content }}",
    "{{ messages[0].content ~ '|' ~ messages[1].content }}",
    "{{ messages[0].content.replace('\n', '') }}",
    "{{ messages | map(attribute='content') | join('') }}",
    "{% for character in messages[0].content %}{{ character }}{% endfor %}",
    "{{ (messages | tojson).replace('\"', '') }}",
    "{{ messages[0] | tojson(ensure_ascii=true, indent=2, sort_keys=true) }}",
]


@pytest.mark.parametrize("template", HOSTILE)
def test_no_template_makes_a_token_of_a_callers_text(tmp_path: Path, template: str) -> None:
    toy = with_template(tmp_path, template)
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

    def tojson(value: object, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment.filters["tojson"] = tojson  # pyright: ignore[reportArgumentType]
    plain = environment.from_string(template)

    words = [*CONTROLS[:4], *HALVES, " |eot|>", "|eot|>", "eot", " eot ", "<|EOT|>", "<\n|eot|>", "<|eo", "<| eot|>"]
    for first in words:
        for second in ("", "<|eot|>", "t|>", "|>"):
            messages: list[Json] = [{"role": "user", "content": first}, {"role": "user", "content": second}]
            pieces = render_chat(toy, messages)
            assert not [piece for piece in pieces if isinstance(piece, Control)], f"{first=} {second=}"
            assert spelled(pieces) == plain.render(messages=messages), f"{first=} {second=}"


def test_tokens_that_a_template_builds_from_a_role_are_tokens(tmp_path: Path) -> None:
    toy = with_template(
        tmp_path, "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' ~ m.content }}{% endfor %}", ("<|user|>",)
    )
    pieces = render_chat(toy, [{"role": "user", "content": "user|>"}, {"role": "user", "content": "<|user|>"}])
    assert pieces == [Control("<|user|>"), Text("user|>"), Control("<|user|>"), Text("<|user|>")]


def test_a_token_that_begins_another_is_not_lengthened_by_the_caller(tmp_path: Path) -> None:
    toy = with_template(tmp_path, "<|eot|>{{ messages[0].content }}", ("<|eot|>more",))
    assert render_chat(toy, [{"role": "user", "content": "more"}]) == [Control("<|eot|>"), Text("more")]


def test_the_mark_is_always_free(nano: Tokenizer) -> None:
    text = "".join(map(chr, range(0xE000, 0xF900))) + "<|eot|>"
    pieces = render_chat(nano, [{"role": "user", "content": text}])
    assert Text(text) in pieces


def test_same_prompt_as_the_oracle(nano: Tokenizer) -> None:
    oracle = PreTrainedTokenizerFast(tokenizer_file=nano.source)
    oracle.chat_template = NANO
    messages, tools = conversation("zzz")
    same: Any = oracle.apply_chat_template(cast("Any", messages), tools=cast("Any", tools), add_generation_prompt=True)
    assert nano.encode_pieces(render_chat(nano, messages, tools=tools)) == same["input_ids"]


SYSTEM = "<|begin_of_text|><|start|>system<|message|>"


def test_prompt_of_one_turn(nano: Tokenizer) -> None:
    ask: list[Json] = [{"role": "user", "content": "Name a prime above 90."}]
    pieces = render_chat(nano, ask, reasoning_effort="high", variables={"current_date": "2026-10-01"})
    system = "You are muse-nano.\nCurrent date: 2026-10-01.\nReasoning strength: 256."
    assert spelled(pieces) == (
        f"{SYSTEM}{system}<|eot|><|start|>user<|message|>Name a prime above 90.<|eot|><|start|>assistant"
    )
    assert spelled(render_chat(nano, ask, add_generation_prompt=False)).endswith("90.<|eot|>")


def test_prompt_after_two_calls(nano: Tokenizer) -> None:
    calls: list[Json] = [
        {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": '{"city": "007"}'}},
        {
            "id": "c2",
            "type": "function",
            "function": {"name": "add", "arguments": '{"a": 1, "b": 2.5, "c": [null, "\u00e9"]}'},
        },
    ]
    messages: list[Json] = [
        {"role": "system", "content": "Reasoning strength: 3."},
        {"role": "user", "content": "Both."},
        {"role": "assistant", "content": "Checking.", "reasoning_content": "need both", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "Berlin"},
        {"role": "tool", "tool_call_id": "unknown", "content": "3.5"},
    ]
    block = "<atem:function_calls>\n{}</atem:invoke>\n</atem:function_calls>"
    lookup = block.format('<atem:invoke name="lookup">\n<atem:parameter name="city">007</atem:parameter>\n')
    values = {"a": "1", "b": "2.5", "c": '[null, "\u00e9"]'}
    lines = "".join(f'<atem:parameter name="{key}">{value}</atem:parameter>\n' for key, value in values.items())
    add = block.format(f'<atem:invoke name="add">\n{lines}')
    assert spelled(render_chat(nano, messages)) == (
        f"{SYSTEM}Reasoning strength: 3.<|eot|><|start|>user<|message|>Both.<|eot|>"
        "<|start|>assistant to=self<|message|>need both<|eom|>"
        "<|start|>assistant to=commentary<|message|>Checking.<|eom|>"
        f"<|start|>assistant to=lookup<|message|>{lookup}<|eom|><|start|>assistant to=add<|message|>{add}<|eot|>"
        '<|start|>tool lookup<|message|><tool_output name="lookup">\nBerlin\n</tool_output><|eot|>'
        '<|start|>tool unknown<|message|><tool_output name="unknown">\n3.5\n</tool_output><|eot|><|start|>assistant'
    )


@pytest.mark.parametrize(
    ("effort", "strength"), [("low", 8), ("medium", 32), ("high", 256), ("xhigh", 512), (None, 512)]
)
def test_reasoning_effort(nano: Tokenizer, effort: str | None, strength: int) -> None:
    assert f"Reasoning strength: {strength}.<|eot|>" in spelled(render_chat(nano, ASK, reasoning_effort=effort))


def test_unknown_effort_is_refused_by_the_template(nano: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"chat template: reasoning_effort must be one of .* not '<|none|>'"):
        render_chat(nano, ASK, reasoning_effort="<|none|>")


def test_either_name_of_the_reasoning(nano: Tokenizer) -> None:
    prompts = [
        spelled(render_chat(nano, [*ASK, {"role": "assistant", "content": None, **given}]))
        for given in ({"reasoning": "r"}, {"reasoning_content": "r"}, {"reasoning": "r", "reasoning_content": "r"})
    ]
    assert len(set(prompts)) == 1
    assert prompts[0].endswith("<|start|>assistant to=self<|message|>r<|eom|><|start|>assistant")


def test_what_templates_of_others_expect(tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}{{ strftime_now('%Y-%m-%d') }}\n"
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}\n"
        "  {% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ {'a': '\u00e9<'} | tojson }}{{ eos_token }}"
        "{{ tools is none }}{{ reasoning_effort is defined }}"
    )
    messages: list[Json] = [*ASK, {"role": "user", "content": "second"}]
    pieces = render_chat(with_template(tmp_path, template), messages, now=datetime(2026, 10, 1))
    assert spelled(pieces) == '<|begin_of_text|>2026-10-01\nsecond{"a": "\u00e9<"}<|end_of_text|>TrueFalse'
    assert pieces[0] == Control("<|begin_of_text|>")


ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% set n = namespace(x='aa') %}{% for a in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% macro m(n) %}{{ m(n - 1) if n }}{{ m(n - 1) if n }}{% endmacro %}{{ m(99) }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ 'aa' * 99999999999 }}",
    "{{ 9 ** 99999999999 }}",
    "{{ range(99999999999) | list }}",
    "{% set x %}{% for a in range(99999) %}{{ messages }}{% endfor %}{% endset %}",
    "{{ messages[0].content.foo.bar }}",
    "{{ messages.append(1) }}",
    "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1] }}",
    "{{ 1 // 0 }}",
    "{{ messages[0] + 1 }}",
]


@pytest.mark.parametrize("template", ENDLESS)
def test_a_misbehaving_template_is_one_error(tmp_path: Path, template: str) -> None:
    toy = with_template(tmp_path, template)
    with pytest.raises(ValueError, match="chat template: "):  # without a budget: after hours, or all memory
        render_chat(toy, [{"role": "user", "content": "x" * 9999}])


def test_templates_that_cannot_be_compiled(tmp_path: Path, nano: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json line 2: "):
        render_chat(with_template(tmp_path / "broken", "\n{% if %}"), ASK)
    with pytest.raises(ValueError, match=r"no chat_template\.jinja"):
        render_chat(load_tokenizer(build(tmp_path / "bare")), ASK)


def deep(levels: int) -> Json:
    value: Json = 0
    for _ in range(levels):
        value = [value]
    return value


def assistant_with(call: Json) -> Json:
    return [{"role": "assistant", "tool_calls": [call]}]


FAULTS: list[tuple[Json, Json, str]] = [
    (5, None, "messages: must be a non-empty list, found 5"),
    ([], None, "messages: must be a non-empty list, found list"),
    ([None], None, r"messages\[0\]: must be an object, found null"),
    ([{"role": "wizard"}], None, r"messages\[0\]\.role: must be one of 'system', .* found 'wizard'"),
    ([*ASK, {"role": "user"}], None, r"messages\[1\]\.content: must be a string or a list .* found null"),
    ([{"role": "user", "content": 7}], None, r"messages\[0\]\.content: must be a string .* found 7"),
    ([{"role": "user", "content": []}], None, r"messages\[0\]\.content: must be a non-empty list"),
    (
        [{"role": "user", "content": [{"type": "image_url"}]}],
        None,
        r"\[0\]\.type: must be 'text', found 'image_url'",
    ),
    ([{"role": "user", "content": [{"type": "text"}]}], None, r"messages\[0\]\.content\[0\]\.text: must be a string"),
    (
        [{"role": "user", "content": "\ud83d"}],
        None,
        r"\[0\]\.content: half of a surrogate pair \(U\+D83D at",
    ),
    ([{"role": "user", "content": "x", "\ud83d": 1}], None, r"messages\[0\]: key '\\ud83d': half of a surrogate pair"),
    ([{"role": "user", "content": "x", "name": 5}], None, r"messages\[0\]\.name: must be a string, found 5"),
    ([{"role": "user", "content": "x", "more": deep(99)}], None, r"messages\[0\]\.more.*: nests deeper than 64 levels"),
    ([{"role": "user", "content": "x", "more": float("nan")}], None, r"messages\[0\]\.more: nan is not a JSON number"),
    (
        [{"role": "user", "content": "x", "tool_calls": [1]}],
        None,
        r"messages\[0\]\.tool_calls: belongs to an assistant",
    ),
    ([{"role": "tool", "content": "x"}], None, r"messages\[0\]: a tool message needs tool_call_id or name"),
    ([{"role": "assistant", "recipient": "a b"}], None, r"messages\[0\]\.recipient: must be a word"),
    ([{"role": "assistant", "reasoning": "a", "reasoning_content": "b"}], None, "reasoning_content: differs"),
    ([{"role": "assistant", "tool_calls": 5}], None, r"messages\[0\]\.tool_calls: must be a non-empty list, found 5"),
    (assistant_with({}), None, r"tool_calls\[0\]\.function: must be an object, found null"),
    (assistant_with({"function": {"name": ""}}), None, r"tool_calls\[0\]\.function\.name: must be a non-empty string"),
    (assistant_with({"type": "custom"}), None, r"tool_calls\[0\]\.type: must be 'function', found 'custom'"),
    (assistant_with({"function": {"name": "f", "arguments": "{"}}), None, r"function\.arguments: is not JSON"),
    (assistant_with({"function": {"name": "f", "arguments": "[" * 99999}}), None, r"function\.arguments: is not JSON"),
    (
        assistant_with({"function": {"name": "f", "arguments": "5"}}),
        None,
        r"arguments: must be an object, found 5",
    ),
    (
        assistant_with({"function": {"name": "f", "arguments": '{"a": 1e999}'}}),
        None,
        r"arguments\.a: inf is not a JSON",
    ),
    (ASK, {}, "tools: must be a non-empty list, found dict"),
    (ASK, [{}], r"tools\[0\]\.type: must be 'function' or 'namespace', found null"),
    (ASK, [{"type": "function"}], r"tools\[0\]\.function: must be an object, found null"),
    (ASK, [{"type": "function", "function": {"name": 5}}], r"tools\[0\]\.function\.name: must be a non-empty"),
    (
        ASK,
        [{"type": "function", "function": {"name": "f", "parameters": 5}}],
        r"\.parameters: must be an object",
    ),
    (
        ASK,
        [{"type": "function", "function": {"name": "f", "description": 5}}],
        r"\.description: must be a string",
    ),
    (ASK, [{"type": "namespace", "name": "n", "tools": [5]}], r"tools\[0\]\.tools\[0\]: must be an object"),
]


@pytest.mark.parametrize(("messages", "tools", "message"), FAULTS)
def test_malformed_input_is_named(nano: Tokenizer, messages: Json, tools: Json, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        render_chat(nano, messages, tools=tools)
    str(caught.value).encode()


def test_variables_of_the_server_cannot_be_given(nano: Tokenizer) -> None:
    with pytest.raises(ValueError, match="template variable messages: is set by the server"):
        render_chat(nano, ASK, variables={"messages": []})


def test_long_hostile_text_comes_through(nano: Tokenizer) -> None:
    text = "<|eot|" * 150_000 + "<   " * 50_000  # a quadratic walk would take hours
    pieces = render_chat(nano, [{"role": "user", "content": text}])
    assert any(isinstance(piece, Text) and text in piece.text for piece in pieces)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages[0].content | replace('X', '') }}", "<X|eot|>"),
        ("{{ messages[0].content | reverse }}", ">|toe|<"),
        ("{{ messages[0].content | striptags }}", "&lt;|eot|&gt;"),
        ("{{ messages[0].content | striptags }}", "&#60;|eot|>"),
        ("{{ messages[0].content.translate({88: none}) }}", "a<X|eot|>"),
        ("{{ messages[0].content.split('Y') | join }}", "<Y|eot|>"),
    ],
)
def test_a_template_that_deletes_or_turns_text_makes_no_token_of_it(tmp_path: Path, template: str, text: str) -> None:
    pieces = render_chat(with_template(tmp_path, template), [{"role": "user", "content": text}])
    assert all(isinstance(piece, Text) for piece in pieces)
    assert "|eot|>" in spelled(pieces)
