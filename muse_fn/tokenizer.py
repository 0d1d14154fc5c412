"""Text to token ids and back, for a folder with a published `tokenizer.json` (byte-level BPE).

Text and control tokens are two kinds: `encode` takes ordinary text and cannot yield a control token whatever the text
spells; a control token enters a prompt only as a `Control` piece. Source: the `tokenizers` file format.
"""

import codecs
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn, TypeAlias, cast

import tokenizers

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

END_OF_MESSAGE = "<|eom|>"
STOP_NAMES = ("<|end_of_text|>", "<|eot|>")
MAX_IDS = 1 << 22  # twenty times the published vocabulary; tables are as long as the highest id
PROBE = "A b  c\n\n\te\u0301 \u00e9 \u212b \u4e2d\u6587 \U0001f468\u200d\U0001f469\u200d\U0001f467 <|x|>\r\n 42 \x00 "


@dataclass(frozen=True, slots=True)
class Text:
    """Ordinary text. A dataclass, not a tuple: a `Text` must never equal a `Control` of the same spelling."""

    text: str


@dataclass(frozen=True, slots=True)
class Control:
    """A control token by its name, such as `<|eot|>`."""

    name: str


Piece: TypeAlias = Text | Control


@dataclass(frozen=True, slots=True, eq=False)
class Tokenizer:
    """A loaded tokenizer folder; nothing in it changes, so it is compared and hashed by identity.

    `controls` maps every added token (special or not) to its id; `bytes_of[id]` is what the id stands for, None for
    an id without a token; `stop_ids` end a generation; `chat_template` is the folder's Jinja text, if it has one.
    """

    source: str
    ordinary: tokenizers.Tokenizer
    controls: Mapping[str, int]
    names: Mapping[int, str]
    bytes_of: tuple[bytes | None, ...]
    spelled: re.Pattern[str]
    stop_ids: tuple[int, ...]
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None

    def __len__(self) -> int:
        """One more than the highest id; ids without a token inside this range are None in `bytes_of`."""
        return len(self.bytes_of)

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text; never a control token. ValueError for half of a surrogate pair."""
        check_text(text)
        ids = self.ordinary.encode_batch_fast([text], add_special_tokens=False)[0].ids  # the form that frees the lock
        assert self.names.keys().isdisjoint(ids), f"ordinary text became a control token: {text[:80]=}"
        return ids

    def encode_pieces(self, pieces: Iterable[Piece]) -> list[int]:
        """Ids of a rendered prompt. No BOS is added: the template writes it. ValueError for an unknown control."""
        ids: list[int] = []
        for piece in pieces:
            ids += self.encode(piece.text) if isinstance(piece, Text) else [self.control_id(piece.name)]
        return ids

    def split_spelled(self, text: str) -> list[Piece]:
        """Cut trusted text at every control token it spells (leftmost, then longest); for text a template wrote."""
        pieces: list[Piece] = []
        start = 0
        for match in self.spelled.finditer(text):
            if match.start() > start:
                pieces.append(Text(text[start : match.start()]))
            pieces.append(Control(match.group()))
            start = match.end()
        return [*pieces, Text(text[start:])] if start < len(text) else pieces

    def control_id(self, name: str) -> int:
        """Id of a control token. ValueError when the folder has none of that name."""
        if name not in self.controls:
            raise ValueError(f"{self.source}: added_tokens has no token named {name!r}")
        return self.controls[name]

    def token_bytes(self, token: int) -> bytes:
        """The bytes one id stands for (part of a character, perhaps). ValueError for an id without a token."""
        found = self.bytes_of[token] if 0 <= token < len(self.bytes_of) else None
        if found is None:
            raise ValueError(f"{self.source}: no token has id {token}; ids run from 0 to {len(self.bytes_of) - 1}")
        return found

    def decode(self, ids: Iterable[int]) -> str:
        """Exact text with control tokens spelled out; only bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def decode_pieces(self, ids: Iterable[int]) -> list[Piece]:
        """Like `decode`, with control tokens kept apart from text that merely spells one."""
        pieces: list[Piece] = []
        run = b""
        for token in ids:
            if token not in self.names:
                run += self.token_bytes(token)
                continue
            if run:
                pieces.append(Text(run.decode("utf-8", errors="replace")))
            pieces.append(Control(self.names[token]))
            run = b""
        return [*pieces, Text(run.decode("utf-8", errors="replace"))] if run else pieces


def whole_characters(data: bytes) -> tuple[str, bytes]:
    """The text of all whole characters, and the bytes of one that is still coming; what can never be one is U+FFFD."""
    text, used = codecs.utf_8_decode(data, "replace", False)
    return text, data[used:]


def check_text(text: str, where: str = "text") -> None:
    """ValueError, naming `where` and the place, for text that has no UTF-8 form (half of a surrogate pair)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"U+{ord(text[error.start]):04X} at character {error.start}"
        raise ValueError(f"{where}: half of a surrogate pair ({found}) is not text") from None


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Read a folder: `tokenizer.json` and, where present, `tokenizer_config.json`, `special_tokens_map.json`,
    `generation_config.json` and `chat_template.jinja`.

    Stop ids are `eos_token_id` of generation_config.json, else `<|end_of_text|>` and `<|eot|>` by name; `<|eom|>` only
    closes a message inside a turn and is never among them. ValueError, naming file and field, for anything unusable;
    FileNotFoundError without tokenizer.json.
    """
    folder = Path(folder)
    source = folder / "tokenizer.json"
    if not source.is_file():
        raise FileNotFoundError(f"{source}: missing; a tokenizer folder needs this file")
    table = _read_object(source)
    controls = _added_tokens(table, source)
    vocab = _vocab(table, source)
    names = {token: name for name, token in controls.items()}
    tokenizer = Tokenizer(
        source=str(source),
        ordinary=_ordinary_encoder(table, set(controls), source),
        controls=MappingProxyType(controls),
        names=MappingProxyType(names),
        bytes_of=_bytes_of(vocab, controls, source),
        spelled=_spelled_pattern(controls),
        stop_ids=_stop_ids(folder, controls, {*vocab.values(), *names}),
        bos_token=_named_token(folder, controls, "bos_token", "<|begin_of_text|>"),
        eos_token=_named_token(folder, controls, "eos_token", "<|end_of_text|>"),
        chat_template=_chat_template(folder),
    )
    if tokenizer.decode(tokenizer.encode(PROBE)) != PROBE:
        _refuse(source, "normalizer, pre_tokenizer", "change the text: it does not decode back to itself")
    return tokenizer


def _refuse(file: Path, field: str, problem: str) -> NoReturn:
    raise ValueError(f"{file}: {field}: {problem}")


def _read_object(file: Path) -> dict[str, Json]:
    try:
        value: Json = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file}: must be a JSON object, found {type(value).__name__}")
    return value


def _read_optional(file: Path) -> dict[str, Json]:
    return _read_object(file) if file.is_file() else {}


def _is_id(value: Json) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_IDS


def _added_tokens(table: dict[str, Json], source: Path) -> dict[str, int]:
    """Name to id of every added token. Stripping flags are ignored: no control token may swallow text beside it."""
    entries = table.get("added_tokens") or []
    if not isinstance(entries, list):
        _refuse(source, "added_tokens", f"must be a list, found {type(entries).__name__}")
    found: dict[str, int] = {}
    ids: set[Json] = set()
    for index, entry in enumerate(entries):
        content, token = (entry.get("content"), entry.get("id")) if isinstance(entry, dict) else (None, None)
        if not isinstance(content, str) or not content or not _is_id(token):
            _refuse(source, f"added_tokens[{index}]", "needs a non-empty content and an id that is a whole number")
        check_text(content, f"{source}: added_tokens[{index}].content")
        if content in found or token in ids:
            _refuse(source, f"added_tokens[{index}]", f"{content!r} or its id {token} appears twice")
        ids.add(cast("int", token))
        found[content] = cast("int", token)
    return found


def _vocab(table: dict[str, Json], source: Path) -> dict[str, int]:
    model = table.get("model")
    if table.get("normalizer") not in (None, {"type": "Sequence", "normalizers": []}):
        _refuse(source, "normalizer", "must be null: another would change the text")
    if isinstance(model, dict) and model.get("dropout"):
        _refuse(source, "model.dropout", "must be null: the same text must give the same ids")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE" or model.get("byte_fallback"):
        _refuse(source, "model", "must be byte-level BPE (type 'BPE', byte_fallback false)")
    vocab = model.get("vocab")
    if not isinstance(vocab, dict) or not vocab or not all(map(_is_id, vocab.values())):
        _refuse(source, "model.vocab", "must map each token to an id that is a whole number")
    return cast("dict[str, int]", vocab)


def _ordinary_encoder(table: dict[str, Json], added: set[str], source: Path) -> tokenizers.Tokenizer:
    """The same tokenizer without any added token: not in its vocabulary either, so that no merge can spell one."""
    model = cast("dict[str, Json]", table["model"])
    vocab = _vocab(table, source)
    merges = model.get("merges") or []
    if not isinstance(merges, list):
        _refuse(source, "model.merges", f"must be a list, found {type(merges).__name__}")
    if not added.isdisjoint(vocab):
        vocab = {token: number for token, number in vocab.items() if token not in added}
        merges = [merge for merge in merges if added.isdisjoint(_merge_names(merge))]
    bare: dict[str, Json] = dict(table, added_tokens=[], post_processor=None, truncation=None, padding=None)
    bare["model"] = dict(model, vocab=cast("Json", vocab), merges=merges)
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(bare))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception, or panics past it, for every unusable file
        raise ValueError(f"{source}: the tokenizers library cannot read it: {error}") from None


def _merge_names(merge: Json) -> tuple[str, ...]:
    """The two tokens a merge joins and the one it makes; files write it as one string or as a pair."""
    listed = merge.split(" ") if isinstance(merge, str) else merge if isinstance(merge, list) else []
    parts = [str(part) for part in listed]
    return (*parts, "".join(parts))


@cache
def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as one visible character: itself where printable, else from U+0100 upwards."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def _bytes_of(vocab: dict[str, int], controls: dict[str, int], source: Path) -> tuple[bytes | None, ...]:
    alphabet = _byte_alphabet()
    missing = [byte for symbol, byte in alphabet.items() if symbol not in vocab or symbol in controls]
    if missing:
        _refuse(source, "model.vocab", f"must have a token for each byte; without one: {sorted(missing)}")
    table: list[bytes | None] = [None] * (1 + max([*vocab.values(), *controls.values()]))
    for symbols, token in vocab.items():
        if symbols in controls:
            continue
        strange = set(symbols) - alphabet.keys()
        if strange:
            _refuse(source, "model.vocab", f"{symbols!r} has characters that stand for no byte: {sorted(strange)}")
        table[token] = bytes(alphabet[symbol] for symbol in symbols)
    for name, token in controls.items():
        if table[token] is not None:
            _refuse(source, "added_tokens", f"{name!r} has the id {token} of an ordinary token")
        table[token] = name.encode("utf-8")
    return tuple(table)


def _spelled_pattern(controls: Iterable[str]) -> re.Pattern[str]:
    """One pattern for all control tokens, as a tree of their characters: thousands of names cost one walk, not one
    attempt each. A name of one character is left out, since text could not be kept apart from it.
    """
    tree: dict[str, object] = {}
    for name in controls:
        node = tree
        for char in name if len(name) > 1 else "":
            node = cast("dict[str, object]", node.setdefault(char, {}))
        if len(name) > 1:
            node[""] = None

    def pattern(node: dict[str, object]) -> str:
        text = ""
        while len(node) == 1 and "" not in node:
            ((char, inner),) = node.items()
            text, node = text + re.escape(char), cast("dict[str, object]", inner)
        branches = [re.escape(char) + pattern(cast("dict[str, object]", inner)) for char, inner in node.items() if char]
        ends = "?" if "" in node else ""
        return f"{text}(?:{'|'.join(branches)}){ends}" if branches else text

    return re.compile(pattern(tree) if tree else r"(?!)")


def _stop_ids(folder: Path, controls: dict[str, int], known: set[int]) -> tuple[int, ...]:
    file = folder / "generation_config.json"
    listed = _read_optional(file).get("eos_token_id")
    wanted = listed if isinstance(listed, list) else [] if listed is None else [listed]
    for token in wanted:
        if not _is_id(token) or token not in known:
            _refuse(file, "eos_token_id", f"{token!r} is not the id of a token")
    inner = controls.get(END_OF_MESSAGE)
    stops = [token for token in cast("list[int]", wanted) if token != inner]
    return tuple(dict.fromkeys(stops or [controls[name] for name in STOP_NAMES if name in controls]))


def _named_token(folder: Path, controls: dict[str, int], field: str, usual: str) -> str | None:
    """A token such as bos_token: tokenizer_config.json, then special_tokens_map.json, then the usual name."""
    for file in (folder / "tokenizer_config.json", folder / "special_tokens_map.json"):
        value = _read_optional(file).get(field)
        name = value.get("content") if isinstance(value, dict) else value
        if name is None:
            continue
        if not isinstance(name, str) or name not in controls:
            _refuse(file, field, f"{name!r} is not among the added tokens of tokenizer.json")
        return name
    return usual if usual in controls else None


def _chat_template(folder: Path) -> str | None:
    """chat_template.jinja, else `chat_template` of tokenizer_config.json (text, or a list with a default)."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: not UTF-8 text: {error}") from None
    config = folder / "tokenizer_config.json"
    value = _read_optional(config).get("chat_template")
    if isinstance(value, list):
        named = [entry for entry in value if isinstance(entry, dict) and entry.get("name") == "default"]
        value = named[0].get("template") if named else None
    if value is not None and not isinstance(value, str):
        _refuse(config, "chat_template", f"must be text, found {type(value).__name__}")
    return value
