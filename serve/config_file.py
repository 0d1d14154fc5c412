"""Options of a command from a file: TOML, one option a line, `_` or `-` between words."""

import inspect
import tomllib
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

import typer


class _Kind(NamedTuple):
    """What an option may be in the file."""

    words: str
    types: tuple[type, ...]

    def fits(self, value: Any) -> bool:
        """Whether the value is of this kind; true and false are no numbers."""
        inner = value if isinstance(value, list) else []
        return type(value) in self.types and all(isinstance(one, str) for one in inner)


LISTS, STRINGS = _Kind("a list of strings", (list,)), _Kind("a string", (str,))
KINDS = {
    bool: _Kind("true or false", (bool,)),
    int: _Kind("a whole number", (int,)),
    float: _Kind("a number", (int, float)),
}


def _take(context: typer.Context, path: Path | None) -> Path | None:
    """Makes what the file says the command's defaults. Raises ValueError naming file and wrong options."""
    if path is None:
        return None
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"--config {path}: cannot be read as TOML ({error})") from error
    kinds = _kinds(context)
    options: dict[str, Any] = {key.replace("-", "_"): value for key, value in given.items()}
    problems = [
        f"{name} is {_shown(value)}: must be {kinds[name].words}"
        for name, value in options.items()
        if name in kinds and not kinds[name].fits(value)
    ]
    unknown = sorted(options.keys() - kinds.keys())
    if unknown:
        problems.append(f"has {', '.join(unknown)}: known are {', '.join(sorted(kinds))}")
    if problems:
        raise ValueError(f"--config {path}: {'; '.join(problems)}")
    context.default_map = {**(context.default_map or {}), **options}
    return path


def _kinds(context: typer.Context) -> dict[str, _Kind]:
    """Every option of the command, and what it may be. What the values may be is checked as on the command line."""
    callback = context.command.callback
    hints = get_type_hints(inspect.unwrap(callback)) if callback else {}
    found: dict[str, _Kind] = {}
    for name in {str(option.name) for option in context.command.params} - {"config", "help"}:
        hint = hints.get(name, str)
        types = get_args(hint) or (hint,)
        is_list = any(getattr(one, "__origin__", None) is list for one in types)
        found[name] = LISTS if is_list else next((kind for one, kind in KINDS.items() if one in types), STRINGS)
    return found


def _shown(value: Any) -> str:
    """A value as the error has it. Strings are not shown: they may be keys."""
    if isinstance(value, bool):
        return str(value).lower()
    names = {str: "a string", list: "a list", dict: "a table"}
    return repr(value) if isinstance(value, int | float) else names.get(type(value), "a date or a time")


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        is_eager=True,
        callback=_take,
        help="TOML file with these options, such as `port = 8000`; what is given on the command line goes first.",
    ),
]
