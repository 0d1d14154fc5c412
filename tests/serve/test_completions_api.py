"""Completions: a stream says what its whole says, stops and characters are exact, fields do what they are named for."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muse_fn.serve.app import make_app
from muse_fn.serve.completions_api import longest_token
from muse_fn.serve.completions_out import FLOOR, joined, token_text
from muse_fn.serve.grammar import Grammars
from muse_fn.serve.jobs import Done, Logprob, New
from muse_fn.tokenizer import Tokenizer
from tests.serve.script import ScriptedEngine, bytes_tokens, make_service, nano, tokens_of
from tests.serve.web import client, data_of, on_loop, post

ASK: dict[str, Any] = {"prompt": "hi", "seed": 1}
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
END = nano()[1].stop_ids[0]
ORDINARY = [token for token in range(len(nano()[1])) if token not in nano()[1].names]


def ask(script: Any, path: str = "/v1/completions", engine: ScriptedEngine | None = None, **body: Any) -> Any:
    engine = engine or ScriptedEngine(script)
    asked = {**ASK, **body} if path == "/v1/completions" else body
    answer = post(make_app(make_service(engine)), path, asked)
    assert answer.status_code == 200, answer.text
    return data_of(answer) if body.get("stream") else answer.json()


def told(chunks: list[Any]) -> list[dict[str, Any]]:
    """The choices that the chunks of a stream add up to."""
    assert chunks[-1] == "[DONE]"
    parts: dict[int, list[dict[str, Any]]] = {}
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            parts.setdefault(choice["index"], []).append(choice)
    return [joined(parts[index]) for index in sorted(parts)]


@given(
    st.lists(st.sampled_from(ORDINARY) | st.sampled_from([1002, 1005, END]), max_size=12),
    st.lists(st.text("abeht ", min_size=1, max_size=3), max_size=3),
    st.fixed_dictionaries(
        {
            "n": st.integers(1, 3),
            "echo": st.booleans(),
            "logprobs": st.none() | st.integers(0, 2),
            "prompt_logprobs": st.none() | st.integers(0, 2),
            "return_token_ids": st.booleans(),
            "include_stop_str_in_output": st.booleans(),
            "skip_special_tokens": st.booleans(),
            "max_tokens": st.integers(0, 14),
            "prompt": st.sampled_from(["hi", [5, 6], ["a", FAMILY], [[1], [2, 3]]]),
        }
    ),
)
def test_a_stream_adds_up_to_its_whole(tokens: list[int], stops: list[str], body: dict[str, Any]) -> None:
    whole = ask(tokens, stop=stops, **body)
    chunks = ask(tokens, stop=stops, stream=True, stream_options={"include_usage": True}, **body)
    assert told(chunks) == whole["choices"]
    assert chunks[-2]["choices"] == []
    assert chunks[-2]["usage"] == whole["usage"]
    prompts = 2 if body["prompt"] in (["a", FAMILY], [[1], [2, 3]]) else 1
    assert len(whole["choices"]) == body["n"] * prompts


@given(st.text(max_size=20), st.lists(st.text("ab\u00e9\U0001f600", min_size=1, max_size=3), max_size=3))
def test_a_stop_string_is_found_however_the_text_is_cut(text: str, stops: list[str]) -> None:
    """Trial 2: the first to be complete ends the text, as if it came character by character."""
    text = text.translate({ord("x"): "ab", ord("y"): "\u00e9", ord("z"): "\U0001f600"})
    ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    for tokens in (bytes_tokens(text), tokens_of(text)):
        for keeps in (False, True):
            (choice,) = ask(tokens, stop=stops, include_stop_str_in_output=keeps)["choices"]
            if ends:
                end, start, stop = min(ends)
                assert choice["text"] == text[: end if keeps else start]
                assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
            else:
                assert choice["text"] == text
                assert choice["stop_reason"] is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("pieces", "stops", "text", "stop"),
    [
        (["ABC", "DEF", "G", "HI", "J", "K"], ["DEFGHIJ"], "ABC", "DEFGHIJ"),
        (["ABC", "DEFG", "HIX"], ["DEFGHIJ"], "ABCDEFGHIX", None),
        (["ABC", "DEFG", "HI"], ["DEFGHIJ"], "ABCDEFGHI", None),
        (["xAB", "C"], ["AB", "ABC"], "x", "AB"),
        (["xABC"], ["ABC", "AB"], "x", "AB"),
        (["aab", "c"], ["aabd", "bc"], "aa", "bc"),
        (["h\u00e9", "\u0065\u0301x"], ["\u00e9"], "h", "\u00e9"),
    ],
)
def test_stops_over_several_tokens(pieces: list[str], stops: list[str], text: str, stop: str, stream: bool) -> None:
    """Trial 2."""
    engine = ScriptedEngine(tokens_of(*pieces))
    answer = ask((), engine=engine, stop=stops, stream=stream)
    (choice,) = told(answer) if stream else answer["choices"]
    assert (choice["text"], choice["stop_reason"]) == (text, stop)
    assert engine.running == 0
    if stream:
        shown = "".join(chunk["choices"][0]["text"] for chunk in answer[:-1])
        assert shown == text


@pytest.mark.parametrize("text", ["\u010f", FAMILY, "\ud55c\uad6d\uc5b4", "a\u00e9b"])
def test_characters_over_several_tokens_are_never_shown_in_part(text: str) -> None:
    """Trial 1."""
    tokens = bytes_tokens(text)
    chunks = ask(tokens, stream=True, logprobs=0)
    assert all("\ufffd" not in chunk["choices"][0]["text"] for chunk in chunks[:-1])
    (choice,) = told(chunks)
    assert choice["text"] == text
    raw = b"".join(bytes_of(shown) for shown in choice["logprobs"]["tokens"])
    assert raw == text.encode()
    (stopped,) = ask([*tokens, *tokens_of("STOP and more")], stop="STOP")["choices"]
    assert stopped["text"] == text
    (cut,) = ask(bytes_tokens(text)[:-1], stream=False)["choices"]
    assert cut["text"] == text.encode()[:-1].decode(errors="replace")


def bytes_of(shown: str) -> bytes:
    listed = shown.removeprefix("bytes:")
    return bytes.fromhex(listed.replace("\\x", "")) if listed != shown else shown.encode()


@given(st.binary(max_size=6))
def test_a_token_as_text_tells_its_bytes(raw: bytes) -> None:
    assert bytes_of(token_text(raw)) == raw or raw.startswith(b"bytes:")
    json.dumps(token_text(raw)).encode()


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("tokens", [[], bytes_tokens("abc")])
def test_usage_comes_once_and_only_when_asked(n: int, tokens: list[int]) -> None:
    """Trial 4."""
    without = ask(tokens, stream=True, n=n)
    assert without[-1] == "[DONE]"
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in without[:-1])
    asked = ask(tokens, stream=True, n=n, stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in asked[:-2]] == [None] * (len(asked) - 2)
    assert asked[-2]["choices"] == []
    assert asked[-2]["usage"]["completion_tokens"] == n * len(tokens)
    running = ask(tokens, stream=True, n=n, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in running[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == n * len(tokens)
    refused = post(make_app(make_service(ScriptedEngine())), "/v1/completions", {**ASK, "stream_options": {}})
    assert refused.status_code == 400


def test_cached_tokens_of_a_prompt_count_once() -> None:
    engine = ScriptedEngine(bytes_tokens("ab"), cached=2)
    found = ask((), engine=engine, prompt=[[1, 2, 3], [4]], n=2)["usage"]
    assert found["prompt_tokens"] == 4
    assert found["prompt_tokens_details"] == {"cached_tokens": 3}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": [1] * 2048}, 400),
        ({"prompt": [1] * 2047}, 200),
        ({"prompt": [1] * 2047, "max_tokens": 1}, 200),
        ({"prompt": [1] * 2047, "max_tokens": 2}, 400),
        ({"prompt": [1], "max_tokens": 2048}, 400),
        ({"model": "other"}, 404),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_known_before_the_first_token_is_a_status(body: dict[str, Any], status: int, stream: bool) -> None:
    """Trials 5 and 31."""
    engine = ScriptedEngine(bytes_tokens("a"))
    answer = post(make_app(make_service(engine)), "/v1/completions", {**ASK, **body, "stream": stream})
    assert answer.status_code == status
    if status == 200:
        assert engine.jobs[0].max_new == 1


def test_a_text_far_too_long_is_refused_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials 44 and 48: and never one that might fit."""
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: pytest.fail("it was encoded"))  # pyright: ignore
    answer = post(make_app(make_service(ScriptedEngine())), "/v1/completions", {"prompt": "word " * 100_000})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    longest = max((raw or b"" for token, raw in enumerate(nano()[1].bytes_of) if token in ORDINARY), key=len)
    assert longest_token(nano()[1]) == len(longest)


def test_without_max_tokens_the_window_is_filled() -> None:
    """Trial 31."""
    engine = ScriptedEngine(bytes_tokens("a"))
    ask((), engine=engine, prompt=[1] * 100)
    assert engine.jobs[0].max_new == 2048 - 100


@pytest.mark.parametrize("failure", [RuntimeError("secret"), Done("error", "a row of logits is not finite")])
@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_failures_of_the_engine(failure: Any, step: int, stream: bool) -> None:
    """Trials 5 and 26: never an answer that looks like a success."""
    engine = ScriptedEngine([*bytes_tokens("abc")[:step], failure])
    answer = post(make_app(make_service(engine)), "/v1/completions", {**ASK, "stream": stream, "n": 2})
    assert "secret" not in answer.text
    assert engine.running == 0
    if stream and step:
        *chunks, last = data_of(answer)
        assert last["error"]["message"]
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    else:
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"


def test_an_abort_is_told_as_such() -> None:
    (choice,) = ask([*bytes_tokens("ab"), Done("abort", "aborted")])["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "abort")


@pytest.mark.parametrize(
    ("body", "text", "finish", "reason"),
    [
        ({}, "ab", "stop", None),
        ({"ignore_eos": True}, "abc", "stop", None),
        ({"ignore_eos": True, "skip_special_tokens": False}, "ab<|end_of_text|>c", "stop", None),
        ({"skip_special_tokens": False}, "ab", "stop", None),
        ({"max_tokens": 1}, "a", "length", None),
        ({"max_tokens": 0}, "", "length", None),
        ({"stop_token_ids": bytes_tokens("b")}, "a", "stop", bytes_tokens("b")[0]),
        ({"stop_token_ids": bytes_tokens("b"), "include_stop_str_in_output": True}, "ab", "stop", bytes_tokens("b")[0]),
    ],
)
def test_ends(body: dict[str, Any], text: str, finish: str, reason: int | None) -> None:
    (choice,) = ask([*bytes_tokens("ab"), END, *bytes_tokens("c")], **body)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, finish, reason)


def test_the_job_is_what_was_asked() -> None:
    engine = ScriptedEngine(bytes_tokens("a"))
    body = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "seed": 5,
        "n": 2,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "logit_bias": {"7": -100, "8": 1.5},
        "stop_token_ids": [9],
        "allowed_token_ids": [9, 7, 9],
        "min_tokens": 2,
        "max_tokens": 3,
        "logprobs": 2,
        "priority": -3,
        "cache_salt": "mine",
    }
    post(make_app(make_service(engine)), "/v1/completions", {**ASK, **body}, headers={"x-request-id": "r1"})
    first, second = engine.jobs
    assert (first.request, first.ids[0], first.max_new, first.min_new) == ("r1", 1000, 3, 2)
    assert (first.sampling.seed, second.sampling.seed) == (5, 6)
    assert (first.sampling.temperature, first.sampling.top_p, first.sampling.min_p) == (0.5, 0.9, 0.1)
    assert first.sampling.top_k in (0, -1)
    assert (first.penalties.presence, first.penalties.frequency, first.penalties.repetition) == (1, -1, 1.5)
    assert first.bias == ((7, -100.0), (8, 1.5))
    assert first.allowed == (9, 7)
    assert set(first.stop_tokens) == {9, *nano()[1].stop_ids}
    assert (first.logprobs, first.prompt_logprobs, first.priority) == (2, None, -3)
    assert first.salts == (("salt", "mine"),)


@pytest.mark.parametrize(
    "body", [{"structured_outputs": {"regex": "[0-9]"}}, {"response_format": {"type": "json_object"}}]
)
def test_every_choice_has_a_constraint_of_its_own(body: dict[str, Any]) -> None:
    config, tokenizer = nano()
    engine, grammars = ScriptedEngine(bytes_tokens("42")), Grammars(tokenizer, config.vocab_size)
    service = make_service(engine, grammars=grammars)

    async def scene() -> int:
        try:
            async with client(make_app(service)) as session:
                return (await session.post("/v1/completions", json={**ASK, **body, "n": 2})).status_code
        finally:
            await grammars.close()

    assert on_loop(scene()) == 200
    first, second = (job.constraint for job in engine.jobs)
    assert first is not None
    assert second is not None
    assert first is not second
    (before,) = {mask.tobytes() for mask in (first.mask(), second.mask()) if mask is not None}
    first.push(tokens_of("4" if "structured_outputs" in body else "{")[0])
    after, other = first.mask(), second.mask()
    assert other is not None
    assert other.tobytes() == before
    assert after is None or after.tobytes() != before
    assert b"muse_fn_grammar_build_seconds_count 1.0" in service.metrics.text(None)[0]


@pytest.mark.parametrize("top_k", [0, -1, None])
def test_the_spellings_of_no_top_k(top_k: int | None) -> None:
    """Trial 25."""
    engine = ScriptedEngine(bytes_tokens("a"))
    ask((), engine=engine, top_k=top_k)
    assert not engine.jobs[0].sampling.is_filtered


def test_without_a_seed_two_requests_differ() -> None:
    engine = ScriptedEngine(bytes_tokens("a"))
    app = make_app(make_service(engine))
    for _ in range(2):
        post(app, "/v1/completions", {"prompt": "hi"})
    assert engine.jobs[0].sampling.seed != engine.jobs[1].sampling.seed


def test_echo_and_offsets_lie_on_the_text() -> None:
    (choice,) = ask(tokens_of("The qu", "ick \u00e9"), prompt=f"a {FAMILY} b", echo=True, logprobs=1)["choices"]
    assert choice["text"] == f"a {FAMILY} bThe quick \u00e9"
    shown = choice["logprobs"]
    assert len({len(values) for values in shown.values()}) == 1
    assert shown["token_logprobs"][0] is None
    for token, offset in zip(shown["tokens"], shown["text_offset"], strict=True):
        if not token.startswith(("bytes:", "<|")):
            assert choice["text"].startswith(token, offset)


def test_scores_of_a_prompt_are_made_once() -> None:
    engine = ScriptedEngine(bytes_tokens("a"))
    found = ask((), engine=engine, prompt=[[5, 6], [7, 8]], n=2, prompt_logprobs=1, temperature=1)
    assert [job.prompt_logprobs for job in engine.jobs] == [1, None, 1, None]
    first = found["choices"][0]["prompt_logprobs"]
    assert first[0] is None
    assert first[1]["6"] == {"logprob": -0.5, "rank": 1, "decoded_token": nano()[1].decode([6])}
    assert found["choices"][1]["prompt_logprobs"] == first


def test_minus_infinity_can_be_said() -> None:
    worst = Logprob(float("-inf"), 1024, ((5, -0.0), (6, float("-inf"))))
    (choice,) = ask([New(7, worst), Done("stop")], logprobs=2)["choices"]
    assert choice["logprobs"]["token_logprobs"] == [FLOOR]


def test_generate_takes_and_gives_ids() -> None:
    body: dict[str, Any] = {"token_ids": [1, 2, 3], "max_tokens": 2, "logprobs": 1, "prompt_logprobs": 1, "seed": 1}
    engine = ScriptedEngine(bytes_tokens("abc"))
    found = ask((), "/generate", engine, **body)
    (choice,) = found["choices"]
    assert choice["token_ids"] == bytes_tokens("ab")
    assert choice["finish_reason"] == "length"
    assert [entry["rank"] for entry in choice["logprobs"]] == [1, 1]
    assert len(choice["prompt_logprobs"]) == 3
    assert told(ask(bytes_tokens("abc"), "/generate", **body, stream=True)) == found["choices"]


def test_generate_needs_no_tokenizer() -> None:
    app = make_app(make_service(ScriptedEngine([5, 6, Done("stop")]), tokenizer=None))
    assert post(app, "/generate", {"token_ids": [1]}).json()["choices"][0]["token_ids"] == [5, 6]
    for path, body in (
        ("/generate", {"token_ids": [1], "stop": "x"}),
        ("/v1/completions", ASK),
        ("/v1/completions", {"prompt": [1], "structured_outputs": {"regex": "a"}}),
    ):
        assert post(app, path, body).status_code == 400


@pytest.mark.parametrize("ids", [[], [1024], [-1], ["a"], [True], 5, None, [[1]]])
def test_generate_refuses_other_ids(ids: Any) -> None:
    answer = post(make_app(make_service(ScriptedEngine())), "/generate", {"token_ids": ids})
    assert answer.status_code == 400
