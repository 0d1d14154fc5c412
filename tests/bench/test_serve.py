"""The benchmark of the server: that it runs, at sizes that say nothing about speed, and that both sides agree in it."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SIZES = "--requests 3 --clients 2 --new 6 --streams 2 --windows 2 --seconds 0.05"


def test_it_prints_a_report_and_the_answers_are_the_same(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    command = [sys.executable, str(ROOT / "bench" / "serve.py"), *SIZES.split(), "--out", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == report.read_text()
    assert "Greedy answers equal to transformers': 3 of 3. Failed requests: none." in done.stdout
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    cells = {row[0]: row[1:] for row in rows}
    theirs = next(row for name, row in cells.items() if name.startswith("transformers"))
    ours = cells["server, 2 clients at once"]
    assert (ours[0], ours[1]) == (theirs[0], theirs[1]), "as many requests, and as many tokens"
    assert "beside a prompt of 128 tokens" in cells
    assert re.search(r"Kept speed \d", done.stdout)
