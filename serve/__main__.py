"""The command line: `muse-fn generate | chat | score | serve | inspect | plan | doctor | bench`.

Built with Muse Spark Open.
"""

import io
import sys

import typer

from muse_fn.serve.bench_serve import bench
from muse_fn.serve.chatting import chat
from muse_fn.serve.doctor import doctor
from muse_fn.serve.generating import generate
from muse_fn.serve.inspect import inspect
from muse_fn.serve.member import line, tell
from muse_fn.serve.options import BANNER
from muse_fn.serve.planning import plan
from muse_fn.serve.score import score
from muse_fn.serve.serving import serve

app = typer.Typer(
    help=f"Muse Spark Open as pure functions. {BANNER}.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (generate, chat, score, serve, inspect, plan, doctor):
    app.command()(command)
app.add_typer(bench, name="bench")


def main() -> None:
    """Runs a command; an error is one message on standard error and exit code 1, a wrong option exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without Unicode shows escapes instead of failing
            stream.reconfigure(errors="backslashreplace")
    line()  # from here on a rank ends with its launcher
    try:
        app()
    except Exception as error:
        if not tell(error):
            raise
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
