"""Text without framing: what was said is the decoded whole, never too early and never taken back."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from muse_fn.serve import plain
from muse_fn.serve.jobs import Done
from muse_fn.serve.plain import Rules, Token
from tests.serve.script import nano

TOKENIZER = nano()[1]
TOKENS = st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=30)


def play(tokens: list[int], rules: Rules, stops: tuple[str, ...] = ()) -> tuple[list[str], list[Token]]:
    """The text after each token and at the end, and the tokens as they were shown."""
    state, texts, shown = plain.begin(rules, stops), list[str](), list[Token]()
    for token in tokens:
        state, text, one = plain.push(state, token)
        texts.append(text)
        shown.append(one)
        if state.stopped is not None:
            break
    return [*texts, plain.finish(state, Done("stop"))[0]], shown


@given(TOKENS)
def test_the_text_is_the_whole_decoded(tokens: list[int]) -> None:
    assert "".join(play(tokens, Rules(TOKENIZER, skips_controls=False))[0]) == TOKENIZER.decode(tokens)


@given(TOKENS)
def test_control_tokens_are_no_text(tokens: list[int]) -> None:
    text = "".join(play(tokens, Rules(TOKENIZER))[0])
    cut = [0, *(place + 1 for place, token in enumerate(tokens) if token in TOKENIZER.names), len(tokens) + 1]
    runs = [tokens[start : end - 1] for start, end in pairwise(cut)]
    assert text == "".join(map(TOKENIZER.decode, runs))


@given(TOKENS)
def test_text_is_said_as_soon_as_its_characters_are_whole(tokens: list[int]) -> None:
    said = ""
    for text, token in zip(play(tokens, Rules(TOKENIZER, skips_controls=False))[0], tokens, strict=False):
        said += text
        raw = TOKENIZER.token_bytes(token)
        if raw and raw[-1] < 0x80:
            assert said.endswith(chr(raw[-1]))


@given(TOKENS, st.lists(st.text("aeht \u00e9", min_size=1, max_size=3), max_size=3))
def test_what_was_said_holds_no_stop_string_and_is_never_taken_back(tokens: list[int], stops: list[str]) -> None:
    texts, _ = play(tokens, Rules(TOKENIZER), tuple(stops))
    whole = "".join(play(tokens, Rules(TOKENIZER))[0])
    text = "".join(texts)
    assert whole.startswith(text)
    assert not any(stop in text for stop in stops)
    assert text == whole or any(whole.startswith(stop, len(text)) for stop in stops)


@given(TOKENS)
def test_offsets_are_where_tokens_begin(tokens: list[int]) -> None:
    _, shown = play(tokens, Rules(TOKENIZER, skips_controls=False))
    text = TOKENIZER.decode(tokens)
    for token in shown:
        first = token.raw[:1]
        if first and first[0] < 0x80 and not token.raw.startswith(b"<|"):
            assert text[token.offset] in (first.decode(), "\ufffd")


@given(st.lists(st.integers(-5, 5000), max_size=10))
def test_ids_without_a_token_say_nothing(tokens: list[int]) -> None:
    assert "".join(play(tokens, Rules(None))[0]) == ""
    assert [token.raw for token in play(tokens, Rules(None))[1]] == [b""] * len(tokens)
    play(tokens, Rules(TOKENIZER))
