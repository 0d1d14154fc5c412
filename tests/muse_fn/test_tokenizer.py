"""Ordinary text never becomes a control token, and every id list decodes to exactly its text."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from muse_fn.tokenizer import Control, Piece, Text, Tokenizer, load_tokenizer
from tests.toy_tokenizer import CONTROLS, build

Edit = Callable[[dict[str, Any]], object]
HALVES = [name[:cut] for name in CONTROLS for cut in range(1, len(name))] + [name[1:] for name in CONTROLS]
SPELLINGS = st.lists(st.sampled_from([*CONTROLS, *HALVES]) | st.text(max_size=5)).map("".join)
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def toy(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


def edited(
    folder: Path, target: Path, change: Callable[[dict[str, Any]], object], name: str = "tokenizer.json"
) -> Path:
    """A copy of the toy folder with one JSON file changed."""
    build(target)
    table = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
    change(table)
    (target / name).write_text(json.dumps(table))
    return target


def is_ordinary(toy: Tokenizer, ids: list[int]) -> bool:
    return toy.names.keys().isdisjoint(ids)


@pytest.mark.parametrize("first", CONTROLS)
def test_every_spelling_and_pair_stays_text(toy: Tokenizer, first: str) -> None:
    for second in ("", *CONTROLS):
        text = first + second
        ids = toy.encode(text)
        assert is_ordinary(toy, ids)
        assert toy.decode(ids) == text


@given(SPELLINGS)
def test_text_survives(toy: Tokenizer, text: str) -> None:
    ids = toy.encode(text)
    assert is_ordinary(toy, ids)
    assert toy.decode(ids) == text
    assert toy.decode_pieces(ids) == ([Text(text)] if text else [])


@given(st.lists(st.sampled_from(CONTROLS).map(Control) | SPELLINGS.filter(bool).map(Text), max_size=8))
def test_pieces_survive(toy: Tokenizer, pieces: list[Piece]) -> None:
    ids = toy.encode_pieces(pieces)
    assert [token for token in ids if token in toy.names] == [
        toy.control_id(piece.name) for piece in pieces if isinstance(piece, Control)
    ]
    assert toy.decode(ids) == "".join(piece.text if isinstance(piece, Text) else piece.name for piece in pieces)


@given(st.text(max_size=20), st.sampled_from(CONTROLS), st.text(max_size=20))
def test_trusted_text_encodes_like_the_oracle(folder: Path, toy: Tokenizer, left: str, name: str, right: str) -> None:
    oracle = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    text = left + name + right
    assert toy.encode_pieces(toy.split_spelled(text)) == oracle.encode(text, add_special_tokens=False)


def test_longest_spelling_wins(folder: Path, tmp_path: Path) -> None:
    def lengthen(table: dict[str, Any]) -> None:
        top = max(entry["id"] for entry in table["added_tokens"])
        table["added_tokens"] += [dict(table["added_tokens"][0], id=top + 1, content="<|eot|>more")]

    toy = load_tokenizer(edited(folder, tmp_path, lengthen))
    assert toy.split_spelled("<|eot|>more<|eot|>mor") == [Control("<|eot|>more"), Control("<|eot|>"), Text("mor")]


def test_a_control_token_inside_the_vocabulary_stays_out_of_reach(folder: Path, tmp_path: Path) -> None:
    def insert(table: dict[str, Any]) -> None:
        table["model"]["vocab"] |= {entry["content"]: entry["id"] for entry in table["added_tokens"]}

    toy = load_tokenizer(edited(folder, tmp_path, insert))
    assert is_ordinary(toy, toy.encode("<|eot|>"))
    assert toy.decode([*toy.encode("<|eot|>"), toy.control_id("<|eot|>")]) == "<|eot|><|eot|>"


@pytest.mark.parametrize("text", ["\u010f", FAMILY, "\ud55c\uae00", "e\u0301"])
def test_bytes_of_split_characters_join_to_the_text(toy: Tokenizer, text: str) -> None:
    ids = toy.encode(text)
    assert b"".join(map(toy.token_bytes, ids)) == text.encode()
    assert toy.decode(ids) == text
    assert toy.decode(ids[:-1]).rstrip("\ufffd") == text.encode()[: -len(toy.token_bytes(ids[-1]))].decode(
        errors="ignore"
    )


def test_stop_ids(folder: Path, tmp_path: Path, toy: Tokenizer) -> None:
    ends = tuple(toy.control_id(name) for name in ("<|end_of_text|>", "<|eot|>"))
    assert toy.stop_ids == ends
    for number, listed in enumerate([None, [], list(ends), toy.control_id("<|eom|>")]):
        name = "generation_config.json"
        copy = edited(
            folder, tmp_path / str(number), lambda table, listed=listed: table.update(eos_token_id=listed), name
        )
        assert load_tokenizer(copy).stop_ids == ends, f"{listed=}"
    change = partial(dict[str, Any].update, eos_token_id=ends[1])
    one = edited(folder, tmp_path / "one", change, "generation_config.json")
    assert load_tokenizer(one).stop_ids == ends[1:]


def test_folder_with_tokenizer_json_alone(folder: Path, tmp_path: Path, toy: Tokenizer) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    alone = load_tokenizer(tmp_path)
    assert (alone.stop_ids, alone.bos_token, alone.eos_token) == (toy.stop_ids, "<|begin_of_text|>", "<|end_of_text|>")
    assert alone.chat_template is None
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [{"name": "default", "template": "x"}]}')
    assert load_tokenizer(tmp_path).chat_template == "x"


@pytest.mark.parametrize("text", ["\ud83d", "a\udc00b"])
def test_half_a_surrogate_pair_is_refused(toy: Tokenizer, text: str) -> None:
    with pytest.raises(ValueError, match=r"half of a surrogate pair \(U\+D"):
        toy.encode(text)
    assert toy.decode(toy.encode("\U0001f600")) == "\U0001f600"


def test_ids_without_a_token_are_refused(toy: Tokenizer) -> None:
    for token in (-1, len(toy)):
        with pytest.raises(ValueError, match=f"no token has id {token}"):
            toy.decode([token])
    with pytest.raises(ValueError, match=re.escape("no token named '<|nothing|>'")):
        toy.control_id("<|nothing|>")


FAULTS: list[tuple[Edit, str]] = [
    (lambda table: table.update(added_tokens=5), "added_tokens: must be a list"),
    (lambda table: table["added_tokens"][0].update(id="x"), r"added_tokens\[0\]: needs"),
    (lambda table: table["added_tokens"][0].update(table["added_tokens"][1]), "appears twice"),
    (lambda table: table["added_tokens"][0].update(id=5), "has the id 5 of an ordinary token"),
    (lambda table: table.pop("model"), "model: must be byte-level BPE"),
    (lambda table: table["model"].update(type="Unigram"), "model: must be byte-level BPE"),
    (lambda table: table["model"].update(vocab=[]), "model.vocab: must map"),
    (lambda table: table["model"]["vocab"].pop("!"), r"without one: \[33\]"),
    (lambda table: table["model"]["vocab"].update({"a b": 9999}), "stand for no byte"),
    (lambda table: table["model"].update(merges=[["a", "nothing"]]), "cannot read it"),
    (lambda table: table.update(normalizer={"type": "NFC"}), "change the text"),
    (lambda table: table["pre_tokenizer"].update(add_prefix_space=True), "change the text"),
]


@pytest.mark.parametrize(("change", "message"), FAULTS)
def test_unusable_tokenizer_json_is_refused(folder: Path, tmp_path: Path, change: Edit, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_tokenizer(edited(folder, tmp_path, change))
    assert str(tmp_path / "tokenizer.json") in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", "{", "not JSON"),
        ("tokenizer.json", "[]", "must be a JSON object, found list"),
        ("generation_config.json", '{"eos_token_id": [99999]}', "eos_token_id: 99999 is not the id of a token"),
        ("generation_config.json", '{"eos_token_id": "2"}', "eos_token_id: '2' is not"),
        ("tokenizer_config.json", '{"bos_token": "<|nothing|>"}', "bos_token: '.*nothing.*' is not among"),
        ("special_tokens_map.json", '{"eos_token": {"content": 5}}', None),
        ("tokenizer_config.json", '{"chat_template": 5}', "chat_template: must be text, found int"),
    ],
)
def test_unusable_small_files_are_refused(tmp_path: Path, name: str, text: str, message: str | None) -> None:
    build(tmp_path)
    (tmp_path / name).write_text(text)
    if message is None:  # tokenizer_config.json has the last word
        assert load_tokenizer(tmp_path).eos_token == "<|end_of_text|>"
        return
    with pytest.raises(ValueError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert name in str(caught.value)


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json: missing"):
        load_tokenizer(tmp_path)
