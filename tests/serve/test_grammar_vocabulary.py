"""Masks: the right bits, no control token, no id without a token, the width of the model."""

import codecs
import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muse_fn.serve.grammar_rules import literal, whole
from muse_fn.serve.grammar_vocabulary import Vocabulary, allows
from tests.serve.grammar_walk import VOCAB, tokenizer

VOCABULARY = Vocabulary(tokenizer(), VOCAB)


@given(st.sets(st.integers(0, VOCAB - 1)))
def test_bits_are_those_of_the_ids(ids: set[int]) -> None:
    mask = VOCABULARY.bits(ids)
    assert mask.dtype == np.int32
    assert mask.shape == (-(-VOCAB // 32),)
    assert {token for token in range(-3, VOCAB + 40) if allows(mask, token)} == ids
    for token in ids:
        assert int(mask[token // 32]) & 0xFFFFFFFF & (1 << (token % 32))


def test_ordinary_tokens_are_all_but_control_tokens_and_holes() -> None:
    known = tokenizer()
    ordinary = {token for token, text in enumerate(known.bytes_of) if text and token not in known.names}
    assert {token for token in range(VOCAB) if allows(VOCABULARY.ordinary, token)} == ordinary


@pytest.mark.parametrize("size", [1003, 1004, 1024, 1025, 1056, 1057, 4096, 5000])
def test_the_library_knows_every_width(size: int) -> None:
    """Also one below the tokenizer's ids, of which those beyond do not exist then."""
    if size <= min(tokenizer().stop_ids):
        with pytest.raises(ValueError, match="no end token"):
            Vocabulary(tokenizer(), size)
        return
    vocabulary = Vocabulary(tokenizer(), size)
    matcher = vocabulary.matcher(whole(lark_grammar="start: /(?s:.*)/"))
    mask = np.frombuffer(matcher.compute_bitmask(), np.int32)[: vocabulary.width]
    expected = {token for token, text in enumerate(vocabulary.texts) if text and _begins_text(text)}
    assert {token for token in range(size) if allows(mask, token)} == expected | {vocabulary.end}


def _begins_text(data: bytes) -> bool:
    try:
        codecs.utf_8_decode(data, "strict", False)
    except UnicodeDecodeError:
        return False
    return True


def test_no_literal_is_matched_by_a_control_token() -> None:
    for name, token in tokenizer().controls.items():
        matcher = VOCABULARY.matcher(whole(lark_grammar=f"start: {literal(name)}"))
        mask = np.frombuffer(matcher.compute_bitmask(), np.int32)
        assert not allows(mask, token)
        assert not matcher.consume_token(token)


def test_a_tokenizer_without_an_end_cannot_have_constraints() -> None:
    endless = dataclasses.replace(tokenizer(), stop_ids=())
    with pytest.raises(ValueError, match="no end token has an id below"):
        Vocabulary(endless, VOCAB)


def test_matching_finds_tokens_by_their_bytes() -> None:
    mask = VOCABULARY.matching(r"\A[0-9]")
    for token, text in enumerate(VOCABULARY.texts):
        assert allows(mask, token) == text[:1].isdigit()
