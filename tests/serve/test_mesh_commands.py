"""The commands on a mesh: the output of one rank, however the ranks are started; refusals; ranks that are killed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from muse_fn.serve.__main__ import main
from tests.processes import PATIENCE, children, have_gone

ROOT = Path(__file__).parent.parent.parent
QUESTION = "What is 3 + 4?"
MUSE = ("-m", "muse_fn.serve")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8", *MUSE)
DRAWN = ("--temperature", "1.2", "--top-k", "40", "--top-p", "0.95", "--seed", "5", "--max-new-tokens", "16")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command in this process, as one rank; what it prints, and what it says."""

    def run(*words: str, code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["muse-fn", *words])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        assert (end.value.code or 0) == code
        shown = capsys.readouterr()
        return shown.out, shown.err

    return run


@contextmanager
def started(*words: str) -> Generator[subprocess.Popen[str]]:
    """A command in a process of its own; killed at the latest here, with all that it started."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
    try:
        yield process
    finally:
        below = children(process.pid) if process.poll() is None else []
        for pid in (process.pid, *below):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def printed(*words: str) -> str:
    """What a command prints, that must end well."""
    with started(*words) as process:
        out, err = process.communicate()
        assert process.returncode == 0, err
        return out


def place(pid: int) -> str:
    """Which rank a process is."""
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return next(text.partition("=")[2] for text in variables if text.startswith("RANK="))


def test_eight_ranks_print_what_one_prints(alone: Any) -> None:
    words = ("generate", QUESTION)
    assert printed(*MUSE, *words, "--mesh", "ep=2,tp=4") == alone(*words)[0] != ""


def test_eight_ranks_under_torchrun_draw_what_one_draws(alone: Any) -> None:
    words = ("generate", QUESTION, "hello", *DRAWN, "--json")
    assert printed(*TORCHRUN, *words, "--mesh", "ep=2,tp=4") == alone(*words)[0] != ""


def test_pipeline_stages_answer_and_score_as_one_rank(alone: Any, tmp_path: Path) -> None:
    written = tmp_path / "answers.jsonl"
    words, mesh = ("generate", QUESTION, "--max-new-tokens", "12"), ("--mesh", "pp=2,ep=1,tp=2")
    expected = alone(*words, "--json")[0]
    assert printed(*MUSE, *words, *mesh, "--output", str(written)) == alone(*words)[0]
    assert written.read_text() == expected
    found, wanted = (
        json.loads(printed(*MUSE, "score", "hi", "--json", *mesh)),
        json.loads(alone("score", "hi", "--json")[0]),
    )
    assert found["ids"] == wanted["ids"]
    assert found["logprobs"][1:] == pytest.approx(wanted["logprobs"][1:], rel=1e-5)


def test_a_killed_rank_ends_the_command_with_its_name(alone: Any) -> None:
    words = ("generate", *[QUESTION] * 30, "--batch", "1", "--json")
    with started(*MUSE, *words, "--mesh", "ep=2,tp=4") as command:
        assert command.stdout
        first = command.stdout.readline()  # the others are being answered
        ranks = {place(pid): pid for pid in children(command.pid)}
        assert len(ranks) == 8
        os.kill(ranks["3"], signal.SIGKILL)
        _, err = command.communicate(timeout=PATIENCE)
        assert command.returncode == 1
        assert err.strip() == "error: rank 3 of 8 was killed by SIGKILL (the system does that when memory runs out)"
        assert have_gone(list(ranks.values()), patience=0)
    assert json.loads(first) == json.loads(alone("generate", QUESTION, "--json")[0])


def test_no_rank_outlives_a_killed_command() -> None:
    words = ("generate", *[QUESTION] * 30, "--batch", "1", "--json")
    with started(*MUSE, *words, "--mesh", "ep=1,tp=2") as command:
        assert command.stdout
        assert command.stdout.readline()
        ranks = children(command.pid)
        assert len(ranks) == 2
        command.kill()
        assert have_gone(ranks)


@pytest.mark.parametrize("words", [("generate", "hi"), ("generate", "hi", "--json"), ("score", "hi")], ids=str)
@pytest.mark.parametrize("mesh", [(), ("--mesh", "tp=2")], ids=str)
def test_a_reader_that_has_gone_ends_the_command_without_a_word(words: tuple[str, ...], mesh: tuple[str, ...]) -> None:
    with started(*MUSE, *words, *mesh) as command:
        assert command.stdout
        assert command.stderr
        command.stdout.close()
        assert command.stderr.read().replace("muse-fn · Built with Muse Spark Open", "").strip() == ""
        assert command.wait() == 1


def test_a_full_disk_is_one_error_that_names_the_file(alone: Any) -> None:
    words = ("generate", "hi", "--max-new-tokens", "2", "--output", "/dev/full", "--json")
    assert "error: --output /dev/full: No space left on device" in alone(*words, code=1)[1]
    with started(*MUSE, *words, "--mesh", "tp=2") as command:
        out, err = command.communicate()
        assert (command.returncode, out) == (1, "")
        assert err.endswith("error: rank 0 of 2: --output /dev/full: No space left on device\n")
        assert err.count("error") == 1


def no_process(*args: object, **more: object) -> None:
    raise AssertionError("a process was started")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("generate", "x", "--mesh", "ep=3,tp=4"),
            "no ep and tp of 12 ranks fit; the largest smaller ones are ep=2,tp=4; ep=4",
        ),
        (("score", "x", "--mesh", "ep=16"), "ep is 16: experts is 8, so ep must be 1, 2, 4 or 8"),
        (("generate", "x", "--mesh", "pp=7"), "the model has 6 layers, so pp must be 1 to 6"),
        (("generate", "x", "--mesh", "ep=2,tp=x"), "'tp=x' is not understood"),
        (("generate", "x", "--mesh", ""), "mesh '': '' is not understood"),
        (("generate", "x", "--mesh", "tp=2", "--device", "cuda"), "needs 2 cards, 0 are here"),
        (("generate", "x", "--mesh", "tp=2", "--device", "cuda:1"), "must be cuda"),
        (("generate", "x", "--mesh", "tp=2", "--device", "nowhere"), "--device nowhere"),
        (("generate", "x", "--mesh", "tp=2", "--model", "/nowhere"), "/nowhere"),
        (("generate", "x", "y", "--mesh", "tp=2", "--max-new-tokens", "5000"), "prompt 1 has"),
        (("generate", "x", "--mesh", "tp=2", "--tools", "/dev/null"), "not JSON"),
        (("score", "--ids", "[99999]", "--mesh", "tp=2"), "id 99999 at 0"),
        (("score", "--ids", str([1] * 5000), "--mesh", "tp=2"), "ids has 5000 tokens: the limit is"),
        (("generate", "x", "--mesh", "tp=2", "--output", "/nowhere/x"), "--output /nowhere/x: cannot be written"),
        (("generate", "x", "--mesh", "tp=2", "--output", "/"), "--output /: cannot be written"),
    ],
)
def test_what_cannot_be_is_refused_before_a_rank_is_started(
    alone: Any, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], told: str
) -> None:
    monkeypatch.setattr(subprocess, "Popen", no_process)
    out, err = alone(*words, code=1)
    assert out == ""
    assert err.count("error: ") == 1
    assert told in err


def test_a_mesh_of_one_rank_starts_no_process(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", no_process)
    words = ("generate", QUESTION, "--max-new-tokens", "4")
    assert alone(*words, "--mesh", "ep=1,tp=1") == alone(*words)


def test_a_pipe_is_refused_since_every_rank_reads_the_file(
    alone: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(subprocess, "Popen", no_process)
    read, write = os.pipe()
    try:
        os.write(write, b'{"prompt": "x"}\n')
        os.close(write)
        _, err = alone("generate", "--file", f"/dev/fd/{read}", "--mesh", "tp=2", code=1)
    finally:
        os.close(read)
    assert "must be a file, since every rank reads it" in err


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(
    ("mesh", "told"),
    [
        (
            ("--mesh", "tp=2"),
            "mesh ep=1,tp=2 has 2 ranks, and 4 processes were started: start 2, or give a mesh of 4: ",
        ),
        ((), "mesh ep=1,tp=1 has 1 ranks, and 4 processes were started"),
        (("--mesh", "ep=3,tp=4"), "does not fit"),
    ],
)
def test_under_torchrun_the_first_rank_says_that_the_mesh_is_another(
    alone: Any, monkeypatch: pytest.MonkeyPatch, mesh: tuple[str, ...], told: str, rank: str
) -> None:
    monkeypatch.setattr("muse_fn.serve.member.PAUSE", 0.0)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "4")
    out, err = alone("generate", "x", "--json", *mesh, code=1)
    assert out == ""
    assert (told in err) if rank == "0" else (err == "")


@pytest.mark.parametrize("mesh", [(), ("--mesh", "tp=2")])
@pytest.mark.parametrize(("rank", "world"), [("0", "abc"), ("x", "2"), ("5", "2"), ("", "")])
def test_an_environment_that_cannot_be_true_is_one_sentence(
    alone: Any, monkeypatch: pytest.MonkeyPatch, rank: str, world: str, mesh: tuple[str, ...]
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world)
    out, err = alone("generate", "x", "--json", *mesh, code=1)
    assert out == ""
    assert err.startswith("error: this process cannot find the others by its environment")
    assert "Traceback" not in err


def test_the_help_names_the_mesh(alone: Any) -> None:
    for command in ("generate", "score"):
        assert "--mesh" in alone(command, "--help")[0]
