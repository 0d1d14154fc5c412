"""The guard of JSON text: numbers stay finite, nesting stays shallow, tags stay outside of strings."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from muse_fn.serve.grammar_guard import DEPTH, DIGITS, EXPONENT, TAGS, Guard, Vetoes
from muse_fn.serve.grammar_vocabulary import Vocabulary, allows
from tests.serve.grammar_walk import VOCAB, tokenizer

VETOES = Vetoes(Vocabulary(tokenizer(), VOCAB))
ALL: NDArray[np.int32] = VETOES.vocabulary.ordinary
BYTES = {text[0]: token for token, text in enumerate(VETOES.vocabulary.texts) if len(text) == 1}
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(-1e9, 1e9).map(lambda number: round(number, 9))
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def after(text: str, texts: frozenset[bytes] | None = None) -> Guard:
    guard = Guard(VETOES, texts)
    guard.push(text.encode())
    return guard


def may(guard: Guard, char: str) -> bool:
    return allows(guard.cut(ALL), BYTES[ord(char)])


def kept(guard: Guard) -> set[bytes]:
    mask = guard.cut(ALL)
    return {text for token, text in enumerate(VETOES.vocabulary.texts) if text and allows(mask, token)}


@given(JSON, st.booleans())
def test_ordinary_json_passes_byte_by_byte(value: object, ascii_only: bool) -> None:
    guard = Guard(VETOES)
    for byte in json.dumps(value, ensure_ascii=ascii_only).encode():
        assert allows(guard.cut(ALL), BYTES[byte])
        guard.push(bytes((byte,)))
    assert guard.depth == 0
    assert not guard.quoted


@given(st.text(alphabet='0123456789eE+-.,:[]{}"\\ a', max_size=80))
def test_numbers_are_finite_and_end_whatever_is_drawn(text: str) -> None:
    """Only what the guard lets through is written; every run of number characters outside strings is then a float."""
    guard, written = Guard(VETOES), ""
    for char in text:
        if may(guard, char):
            if guard.depth == 0 and char in "]}":
                continue
            guard.push(char.encode())
            written += "x" if guard.quoted or char == '"' else char
    for run in "".join(char if char in "0123456789eE+-." else " " for char in written).split():
        try:
            assert math.isfinite(float(run))
        except ValueError:
            continue
        assert sum(map(str.isdigit, run.lower().partition("e")[0])) <= DIGITS


def test_exponents_have_two_digits_in_tokens_of_any_length() -> None:
    assert may(after("[1e9"), "9")
    assert not may(after("[1e99"), "9")
    assert not may(after("[1e-99"), "9")
    assert may(after('["1e99'), "9")
    assert may(after("[1e99,"), "9")
    vetoes = [after("[1e"), after("[1e1"), after("[1")]
    for guard, run in zip(vetoes, ("999", "99", "e999"), strict=True):
        assert not [text for text in kept(guard) if text.startswith(run.encode())]
    assert EXPONENT == 2


def test_digits_run_out_unless_nothing_else_is_allowed() -> None:
    guard = after("[" + "1" * DIGITS)
    assert not may(guard, "1")
    assert may(guard, ",")
    digits = VETOES.digit
    assert np.array_equal(guard.cut(digits), digits)
    assert may(after("[" + "1" * DIGITS + ","), "1")


def test_nesting_runs_out() -> None:
    assert may(after("[" * (DEPTH - 1)), "[")
    assert not may(after("[" * DEPTH), "[")
    assert not may(after('{"a":[' * (DEPTH // 2)), "{")
    assert may(after("[" * DEPTH + '"'), "[")
    assert not [text for text in kept(after("[" * DEPTH + '"')) if b'"' in text and b"[" in text.partition(b'"')[2]]


@pytest.mark.parametrize("tag", [tag.decode() for tag in TAGS])
def test_tags_in_strings_only(tag: str) -> None:
    opening = '<atem:parameter name="j">'
    raw = frozenset((b"s",))
    assert not may(after(f'{opening}"{tag[:-1]}', raw), ">")
    assert not may(after(f'{opening}"<{tag[:-1]}', raw), ">")
    assert not may(after(f'{opening}"\\"{tag[:-1]}', raw), ">")
    assert may(after(f'{opening}""{tag[:-1]}', raw), ">")
    assert may(after(f"{opening}1{tag[:-1]}", raw), ">")
    assert may(after(f'{opening}"{tag[:-1]} ', raw), ">")
    assert may(after(f'<atem:parameter name="s">"{tag[:-1]}', raw), ">")
    assert may(after(f'"{tag[:-1]}'), ">")


def test_a_value_ends_at_its_tag_and_the_next_is_read_by_its_own_kind() -> None:
    raw = frozenset((b"s",))
    guard = after('<atem:parameter name="s">"[1</atem:parameter>\n<atem:parameter name="j">[', raw)
    assert (guard.place, guard.depth, guard.quoted) == ("json", 1, False)
    guard.push(b'"a"]</atem:parameter>\n')
    assert (guard.place, guard.depth) == ("markup", 0)


def test_whole_tags_in_one_token_are_judged_by_where_they_begin() -> None:
    """No token of the embedded vocabulary holds a whole tag, so one is made up."""
    vocabulary = Vocabulary(tokenizer(), VOCAB)
    inside, behind = BYTES[ord("a")], BYTES[ord("b")]
    vocabulary.texts[inside], vocabulary.texts[behind] = b"a</atem:parameter>", b'b"</atem:parameter>'
    guard = Guard(Vetoes(vocabulary), frozenset())
    guard.vetoes.whole = tuple((token, TAGS[0]) for token in (inside, behind))
    guard.push(b'<atem:parameter name="j">"')
    assert not allows(guard.cut(ALL), inside)
    assert allows(guard.cut(ALL), behind)
    guard.push(b'"')
    assert allows(guard.cut(ALL), inside)
    assert not allows(guard.cut(ALL), behind)
