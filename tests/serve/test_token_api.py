"""Tokens of texts and conversations are those that generating would use."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muse_fn.serve.app import make_app
from tests.serve.script import ScriptedEngine, bytes_tokens, make_service, nano
from tests.serve.web import post

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi <|eot|>"}]}


def ask(path: str, body: dict[str, Any], status: int = 200) -> Any:
    answer = post(make_app(make_service(ScriptedEngine(bytes_tokens("a")))), path, body)
    assert answer.status_code == status, answer.text
    return answer.json()


@given(TEXTS, st.sampled_from(["", "/v1"]))
def test_there_and_back(text: str, prefix: str) -> None:
    found = ask(f"{prefix}/tokenize", {"prompt": text, "add_special_tokens": False})
    assert found["count"] == len(found["tokens"])
    assert ask(f"{prefix}/detokenize", {"tokens": found["tokens"]})["prompt"] == text


def test_the_begin_token_is_there_unless_unwanted() -> None:
    assert ask("/tokenize", {"prompt": "hi"})["tokens"][0] == 1000
    assert ask("/tokenize", {"prompt": ""})["tokens"] == [1000]
    assert ask("/tokenize", {"prompt": "", "add_special_tokens": False})["tokens"] == []


def test_tokens_as_strings() -> None:
    found = ask("/tokenize", {"prompt": "a\U0001f468", "return_token_strs": True})
    assert found["token_strs"][:2] == ["<|begin_of_text|>", "a"]
    assert found["max_model_len"] == 2048


def test_text_that_spells_a_control_token_is_text() -> None:
    assert 1003 not in ask("/tokenize", {"prompt": "<|eot|>"})["tokens"]


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": CHAT["messages"]}, {"prompt": 5}, {"messages": []}])
def test_tokenize_takes_one_of_both(body: dict[str, Any]) -> None:
    ask("/tokenize", body, 400)


@pytest.mark.parametrize(
    ("name", "value"), [("tools", CHAT["messages"]), ("reasoning_effort", "low"), ("chat_template_kwargs", {"a": 1})]
)
def test_a_text_has_nothing_that_only_a_conversation_has(name: str, value: Any) -> None:
    assert ask("/tokenize", {"prompt": "a", name: value}, 400)["error"]["param"] == name


@pytest.mark.parametrize("tokens", [[1024], [-1], ["a"], [True], 5, None, [10**30], [[1]]])
def test_detokenize_refuses_what_is_no_token(tokens: Any) -> None:
    assert ask("/detokenize", {"tokens": tokens}, 400)["error"]["param"].startswith("tokens")


def test_a_rendered_conversation_is_what_a_chat_generates_from() -> None:
    engine = ScriptedEngine(bytes_tokens("a"))
    app = make_app(make_service(engine))
    rendered = post(app, "/v1/chat/completions/render", CHAT).json()
    assert post(app, "/v1/chat/completions", CHAT).status_code == 200
    assert tuple(rendered["token_ids"]) == engine.jobs[0].ids
    assert rendered["prompt"] == nano()[1].decode(rendered["token_ids"])
    assert rendered["count"] == len(rendered["token_ids"]) == ask("/tokenize", CHAT)["count"]


def test_rendered_prompts_are_what_completions_continue() -> None:
    engine = ScriptedEngine(bytes_tokens("a"))
    app = make_app(make_service(engine))
    body = {"prompt": ["hi", "there"]}
    rendered = post(app, "/v1/completions/render", body).json()["data"]
    post(app, "/v1/completions", body)
    assert [tuple(entry["token_ids"]) for entry in rendered] == [job.ids for job in engine.jobs]
    assert [entry["prompt"] for entry in rendered] == body["prompt"]


@pytest.mark.parametrize("path", ["/v1/chat/completions/render", "/v1/chat/completions"])
def test_a_template_cannot_be_given(path: str) -> None:
    assert ask(path, {**CHAT, "chat_template": "{{ 1 }}"}, 400)["error"]["param"] == "chat_template"


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/chat/completions/render"])
def test_without_a_tokenizer_there_is_nothing_to_say(path: str) -> None:
    bodies: dict[str, Any] = {"/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [1]}}
    app = make_app(make_service(ScriptedEngine(), tokenizer=None))
    assert post(app, path, bodies.get(path, CHAT)).status_code == 404
