"""Bodies of requests: whatever is sent, the answer is the checked value or a 4xx that says where."""

import gzip
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muse_fn.serve.app import make_app
from muse_fn.serve.bodies import load_json
from muse_fn.serve.errors import BadRequest
from muse_fn.serve.service import Limits
from muse_fn.tokenizer import Json
from tests.serve.script import ScriptedEngine, bytes_tokens, make_service, quick
from tests.serve.web import call, post

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
ASK: dict[str, Any] = {"prompt": "hi", "max_tokens": 2}
HALF = "\ud83d"


def app_of(**changes: Any) -> Any:
    return make_app(make_service(ScriptedEngine(bytes_tokens("abc")), **changes))


def send(raw: bytes, headers: dict[str, str] | None = None, path: str = "/v1/completions", **changes: Any) -> Any:
    told = {"content-type": "application/json"} if headers is None else headers
    return call(app_of(**changes), "POST", path, content=raw, headers=told)


def assert_refused(answer: Any, status: int = 400, param: str | None = None) -> str:
    """A 4xx in JSON with a message; returns it."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["message"]
    assert error["type"]
    assert "Traceback" not in answer.text
    if param is not None:
        assert error["param"] == param, error
    return error["message"]


def refusal(raw: bytes) -> BadRequest | None:
    """Anything but a value and a BadRequest fails the test."""
    try:
        load_json(raw, Limits())
    except BadRequest as error:
        return error
    return None


@given(JSON_VALUES)
def test_what_json_can_say_comes_through(value: Json) -> None:
    assert load_json(json.dumps(value).encode(), Limits()) == value
    assert load_json(json.dumps(value, ensure_ascii=False).encode(), Limits()) == value


@given(st.binary(max_size=80))
def test_any_bytes_are_a_value_or_refused(raw: bytes) -> None:
    error = refusal(raw)
    assert error is None or (str(error).isascii() and error.status == 400)


@given(JSON_VALUES, st.data())
def test_damaged_json_is_a_value_or_refused(value: Json, data: st.DataObject) -> None:
    raw = bytearray(json.dumps(value).encode())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] = data.draw(st.integers(0, 255))
    error = refusal(bytes(raw))
    assert error is None or str(error)


@pytest.mark.parametrize("depth", [64, 65, 10_000, 200_000])
@pytest.mark.parametrize(("left", "right"), [("[", "]"), ('{"a":', "}")])
def test_depth_is_bounded(depth: int, left: str, right: str) -> None:
    """Trial 45."""
    raw = (left * depth + "1" + right * depth).encode()
    if depth <= 64:
        load_json(raw, Limits())
        return
    with pytest.raises(BadRequest, match="deeper than 64"):
        load_json(raw, Limits())


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'{"a": NaN}', "NaN"),
        (b'{"a": Infinity}', "Infinity"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": 1e999}', "out of range"),
        (b'{"a": ' + b"9" * 5000 + b"}", "5000 digits"),
        (b'{"a": 1, "a": 2}', "'a' appears twice"),
        (b'{"x": {"a": 1, "b": 2, "a": 1}}', "'a' appears twice"),
        (b'\xef\xbb\xbf{"a": 1}', "byte order mark"),
        (b'\xff\xfe{"a": 1}', "byte order mark"),
        (b'{"a": "\xff"}', "0xff at 7"),
        (b'{"a": "\xed\xa0\xbd"}', "not UTF-8"),
        (b'{"a": "\\ud83d"}', r"a: half of a surrogate pair \(U\+D83D"),
        (b'{"a": [{"b": "x\\uDE00"}]}', r"a\[0\].b: half"),
        (b'{"a": {"\\ud83d": 1}}', "a: a key: half"),
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"a": 1} x', "not JSON"),
        (b"{'a': 1}", "not JSON"),
    ],
)
def test_what_is_not_strict_json_is_refused(raw: bytes, words: str) -> None:
    """Trials 45 and 47."""
    with pytest.raises(BadRequest, match=words):
        load_json(raw, Limits())


def test_pairs_and_nul_are_text() -> None:
    """Trial 47: a proper pair works, and so does a NUL."""
    assert load_json(b'{"a": "\\ud83d\\ude00\\u0000"}', Limits()) == {"a": "\U0001f600\0"}
    assert send(b'{"prompt": "\\ud83d\\ude00\\u0000", "max_tokens": 1}').status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": f"a{HALF}"}, "prompt"),
        ({"prompt": ["a", HALF]}, "prompt[1]"),
        ({"stop": HALF}, "stop"),
        ({"stop": ["a", HALF]}, "stop[1]"),
        ({"logit_bias": {HALF: 1}}, "logit_bias"),
        ({"model": HALF}, "model"),
        ({"user": HALF}, "user"),
        ({"cache_salt": HALF}, "cache_salt"),
        ({"structured_outputs": {"json": {"enum": [HALF]}}}, "structured_outputs.json.enum[0]"),
    ],
)
def test_halves_of_pairs_are_refused_by_path(body: dict[str, Any], param: str, stream: bool) -> None:
    """Trial 47."""
    answer = send(json.dumps({**ASK, **body, "stream": stream}).encode())
    assert_refused(answer, 400, param)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 1e30),
        ("max_tokens", 10**30),
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("max_tokens", 5.0),
        ("max_tokens", []),
        ("temperature", -1),
        ("temperature", 3),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", 10**400),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 2),
        ("n", 0),
        ("n", -1),
        ("n", 10**6),
        ("stop", [""]),
        ("stop", ""),
        ("stop", 5),
        ("stop", {}),
        ("stop", [5]),
        ("stop", ["a", None]),
        ("stream", "yes"),
        ("stream", 1),
        ("echo", "no"),
        ("seed", 2**63),
        ("seed", "1"),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("logprobs", -1),
        ("logprobs", 10**6),
        ("logprobs", True),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        ("min_tokens", -1),
        ("min_tokens", 5),
        ("prompt", 5),
        ("prompt", {}),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", [None]),
        ("prompt", ["a", 5]),
        ("prompt", [1, "a"]),
        ("prompt", [[1], "a", [True]]),
        ("prompt", [-1]),
        ("prompt", [1024]),
        ("prompt", None),
        ("suffix", "x"),
        ("suffix", 1),
        ("best_of", 3),
        ("model", "other"),
        ("model", 5),
        ("cache_salt", ""),
        ("cache_salt", "x" * 1000),
        ("priority", 1.5),
        ("structured_outputs", []),
        ("structured_outputs", {}),
        ("structured_outputs", {"json": ""}),
        ("structured_outputs", {"json_object": False}),
        ("structured_outputs", {"regex": ""}),
        ("structured_outputs", {"choice": []}),
        ("structured_outputs", {"choice": "a"}),
        ("structured_outputs", {"choice": [""]}),
        ("structured_outputs", {"grammar": ""}),
        ("structured_outputs", {"grammar": 5}),
        ("structured_outputs", {"wat": 1}),
        ("structured_outputs", {"regex": "a", "choice": ["a"]}),
        ("response_format", {"type": "wat"}),
        ("response_format", {}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "schema": {}}),
        ("stream_options", {"include_usage": True}),
        ("stream_options", 5),
    ],
)
def test_wrong_values_are_refused_by_name(field: str, value: object) -> None:
    """Trial 45: one wrong field at a time; nothing of it reaches the engine."""
    engine = ScriptedEngine(bytes_tokens("abc"))
    raw = json.dumps({**ASK, field: value}).encode()
    app = make_app(make_service(engine))
    answer = call(app, "POST", "/v1/completions", content=raw, headers={"content-type": "application/json"})
    message = assert_refused(answer, 404 if value == "other" else 400)
    if not (field == "temperature" and value == 10**400):
        assert message.startswith(field), message
        assert answer.json()["error"]["param"].startswith(field)
    assert engine.jobs == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {"202048": 5}),
        ("logit_bias", {"1024": 5}),
        ("logit_bias", {"-1": 5}),
        ("logit_bias", {"AI": -100}),
        ("logit_bias", {"5": 1e9}),
        ("logit_bias", {"5": None}),
        ("logit_bias", {"5": "1"}),
        ("logit_bias", {"05": 1, "5": 1}),
        ("logit_bias", {"\u0665": 1}),
        ("logit_bias", []),
        ("stop_token_ids", [999999]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", 5),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [1024]),
    ],
)
def test_ids_outside_of_the_vocabulary_are_refused(field: str, value: object) -> None:
    """Trial 24."""
    message = assert_refused(post(app_of(), "/v1/completions", {**ASK, field: value, "min_tokens": 1}))
    assert message.startswith(field)


@pytest.mark.parametrize(
    "field",
    "model n max_tokens temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed stop "
    "stop_token_ids allowed_token_ids logit_bias include_stop_str_in_output ignore_eos min_tokens prompt_logprobs "
    "stream stream_options return_token_ids priority cache_salt user structured_outputs echo suffix best_of logprobs "
    "response_format add_special_tokens skip_special_tokens".split(),
)
def test_null_is_the_default(field: str) -> None:
    """Trial 45."""
    absent, null = ScriptedEngine(bytes_tokens("abc")), ScriptedEngine(bytes_tokens("abc"))
    base = {"prompt": "hi", "seed": 7} | ({} if field != "seed" else {"temperature": 0})
    first = post(make_app(make_service(absent)), "/v1/completions", base)
    second = post(make_app(make_service(null)), "/v1/completions", {**base, field: None})
    assert (first.status_code, second.status_code) == (200, 200)
    assert first.json()["choices"] == second.json()["choices"]
    if field != "seed":
        assert absent.jobs[0].sampling == null.jobs[0].sampling


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 415),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "multipart/form-data; boundary=x"}, 415),
        ({"content-type": "application/json; charset=latin-1"}, 415),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415),
        ({"content-type": "application/json", "content-encoding": "br"}, 415),
        ({"content-type": "application/json; charset=utf-8"}, 200),
        ({"content-type": "Application/JSON;charset=UTF-8"}, 200),
        ({"content-type": "application/json", "content-encoding": "identity"}, 200),
    ],
)
def test_content_types_and_encodings(headers: dict[str, str], status: int) -> None:
    """Trial 45."""
    raw = json.dumps(ASK).encode()
    raw = gzip.compress(raw) if headers.get("content-encoding") == "gzip" else raw
    answer = send(raw, headers)
    assert answer.status_code == status
    if status != 200:
        assert_refused(answer, status)


@pytest.mark.parametrize("raw", [b"[]", b"5", b'"x"', b"null", b"true", b"[{}]"])
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/detokenize", "/generate", "/abort"])
def test_a_body_is_an_object(raw: bytes, path: str) -> None:
    """Trial 45."""
    assert "object" in assert_refused(send(raw, path=path))


def test_a_body_of_more_than_the_limit_is_refused() -> None:
    raw = json.dumps({"prompt": "x" * 2000}).encode()
    assert_refused(send(raw, limits=quick(body=1000)), 413)

    async def parts() -> Any:
        for start in range(0, len(raw), 100):
            yield raw[start : start + 100]

    chunked = call(
        app_of(limits=quick(body=1000)),
        "POST",
        "/v1/completions",
        content=parts(),
        headers={"content-type": "application/json"},
    )
    assert_refused(chunked, 413)


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        ({"n": 10**6}, 64),
        ({"prompt": ["a"] * 100_000}, 128),
        ({"prompt": ["a"] * 64, "n": 64}, 128),
        ({"stop": [str(i) for i in range(10_000)]}, 16),
        ({"stop": "x" * 10**6}, 1024),
        ({"logit_bias": {str(i): 1 for i in range(10**5)}}, 1024),
        ({"logprobs": 10**6}, 20),
        ({"allowed_token_ids": [1] * 10**5}, 1024),
        ({"stop_token_ids": [1] * 10**5}, 1024),
    ],
)
def test_floods_are_refused_with_the_limit(body: dict[str, Any], limit: int) -> None:
    """Trial 48."""
    message = assert_refused(post(app_of(), "/v1/completions", {**ASK, **body}))
    assert str(limit) in message
    assert len(message) < 500


def test_messages_of_floods_of_problems_are_short() -> None:
    """Trial 48: a million wrong entries are one sentence."""
    message = assert_refused(post(app_of(), "/v1/completions", {**ASK, "stop_token_ids": ["x"] * 300_000}))
    assert len(message) < 2000
    wrong = {f"f{i}": 1 for i in range(1000)}
    answer = post(app_of(), "/v1/completions", {**ASK, **wrong})
    assert len(answer.json()["warnings"]) == 9


def test_all_problems_are_listed() -> None:
    message = assert_refused(post(app_of(), "/v1/completions", {**ASK, "n": 0, "top_p": 2, "stream": "x"}), 400, "n")
    assert all(name in message for name in ("n:", "top_p:", "stream:"))


def test_unknown_fields_warn_or_are_refused() -> None:
    body = {**ASK, "stream": True, "wat": 1, "stream_options": {"include_usage": True, "huh": 1}}
    first = post(app_of(), "/v1/completions", body).text.split("\n\n")[0]
    told = json.loads(first.removeprefix("data: "))["warnings"]
    assert told == ["wat: unknown field, ignored", "stream_options.huh: unknown field, ignored"]
    assert_refused(post(app_of(strict=True), "/v1/completions", body), 400, "wat")
    assert "warnings" not in post(app_of(), "/v1/completions", ASK).json()


def test_a_field_is_named_in_ascii_whatever_its_name() -> None:
    answer = post(app_of(), "/v1/completions", {**ASK, "\u4e2d\n": 1, "x" * 10_000: 1})
    assert all(text.isascii() and len(text) < 200 for text in answer.json()["warnings"])
