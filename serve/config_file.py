"""Options of a command from a file: TOML, one option a line, `_` or `-` between words."""

import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer


def _take(context: typer.Context, path: Path | None) -> Path | None:
    """Makes what the file says the command's defaults. Raises ValueError naming file and option."""
    if path is None:
        return None
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"--config {path}: cannot be read as TOML ({error})") from error
    known = {str(option.name) for option in context.command.params} - {"config", "help"}
    options: dict[str, Any] = {key.replace("-", "_"): value for key, value in given.items()}
    unknown = sorted(options.keys() - known)
    if unknown:
        raise ValueError(f"--config {path}: has {', '.join(unknown)}: known are {', '.join(sorted(known))}")
    context.default_map = {**(context.default_map or {}), **options}
    return path


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        is_eager=True,
        callback=_take,
        help="TOML file with these options, such as `port = 8000`; what is given on the command line goes first.",
    ),
]
