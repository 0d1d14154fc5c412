"""`muse-fn plan`: tables and JSON say the same, every refusal is one sentence, and pictures are drawn."""

import json
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest

from muse_fn.devices import assumptions
from muse_fn.footprint import COMPONENTS
from muse_fn.params.config import Config
from muse_fn.plan import Setup, compare, plan
from muse_fn.serve.__main__ import main
from muse_fn.serve.drawing import COLOURS, draw
from muse_fn.serve.options import EMBEDDED
from muse_fn.serve.planned import BUSY
from muse_fn.serve.planning import changes, config_of, sizes
from muse_fn.sharding.mesh import Mesh

GAUDI = ("--config", "released", "--device", "gaudi2", "--mesh", "ep=2,tp=4")


class Run(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Shell = Callable[..., Run]


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    """Runs `muse-fn plan` in this process."""

    def run(*words: str) -> Run:
        monkeypatch.setattr(sys, "argv", ["muse-fn", "plan", *words])
        capsys.readouterr()
        code: int | str | None = 0
        try:
            main()
        except SystemExit as end:
            code = end.code
        found = capsys.readouterr()
        return Run(code if isinstance(code, int) else 0, found.out, found.err)

    return run


def test_the_released_model_on_eight_gaudi2(shell: Shell) -> None:
    found = shell(*GAUDI)
    assert found.code == 0
    for number in (
        "65.97",
        "8,192",
        "31,744",
        "223.9",
        "small vectors, not in the sum",
        "0.13",
        "4.00",
        "17.805",
        "42,271",
    ):
        assert number in found.out, number
    assert "measured 39.7 tokens/s" in found.out
    assert "28.7 ms of host time" in found.out
    assert "313 graph" in found.out
    assert "This program has never run on a Gaudi." in found.out
    assert "Built with Muse Spark Open" in found.err
    split = shell(*GAUDI[:-1], "ep=2,tp=4,squeeze=split").out
    for number in ("59.19", "106.4"):
        assert number in split


def test_json_has_all_that_the_tables_have(shell: Shell) -> None:
    found = shell(*GAUDI, "--compare", "--json")
    assert found.err == ""
    values = found.json
    assert values["memory"][0]["kv_per_token"] == 8_192
    assert values["memory"][0]["kv_per_token_unwindowed"] == 31_744
    assert values["memory"][0]["ranks"] == list(range(8))
    assert sum(values["memory"][0]["weights"].values()) == 2 * values["weights"]
    assert values["layer"]["matrices_total"]["mean"] == 223_870_976
    assert values["layer"]["vectors"] == 132_096
    assert values["port"]["measured"] == 39.7
    assert values["port"]["predicted"] == values["decode"][0]["tokens_per_second"]
    assert [line["batch"] for line in values["decode"]] == [1, 4, 16, 64]
    assert values["prefill"]["new"] == 4096
    for step in (*values["decode"], values["prefill"]):
        parts = dict(step["seconds"])
        assert parts.pop("total") == pytest.approx(sum(parts.values()))
    setup, assumed = Setup(Config(), Mesh(2, 4)), assumptions("gaudi2", 8)
    assert {x["mesh"]: x["prefill"] for x in values["compare"]} == {
        str(x.mesh): x.prefill.tokens_per_second for x in compare(setup, assumed) if x.prefill
    }
    assert values["assumptions"] == [row._asdict() for row in assumed]
    tables = shell(*GAUDI, "--compare").out
    for layout in values["compare"]:
        assert f"{layout['decode']['1']:,.1f}" in tables
    for row in values["assumptions"]:
        assert f"{row['value']:,.6g}" in tables
    assert [note for note in values["notes"] if note not in tables] == []


def test_nothing_is_cut_from_a_table_in_a_narrow_terminal(shell: Shell) -> None:
    found = shell(*GAUDI, "--compare", "--batch", "1,2,4,8,16,32,64,128").out
    assert "…" not in found


def test_the_embedded_model_is_planned_for_when_none_is_named(shell: Shell) -> None:
    found = shell("--json").json
    config = Config.from_json(EMBEDDED)
    assert found == shell("--model", str(EMBEDDED), "--json").json
    assert found == shell("--config", str(EMBEDDED / "config.json"), "--json").json
    assert found["context"] + found["prefill"]["new"] == config.max_positions
    assert found["port"] is None
    assert any("guesses" in note for note in found["notes"])
    assert config_of(EMBEDDED / "model.safetensors", None) == config


def test_assumptions_are_replaced_and_say_so(shell: Shell) -> None:
    found = shell(*GAUDI, "--assume", "host_us=15600", "--assume", "collective_us=0", "--json").json
    rows = {row["name"]: row for row in found["assumptions"]}
    assert rows["host_us"]["value"] == 15600
    assert rows["host_us"]["source"].startswith("given; otherwise 0")
    assert found["decode"][0]["seconds"]["host"] == pytest.approx(0.0156)
    assert found["port"]["predicted"] == found["decode"][0]["tokens_per_second"]
    assert "host" in shell(*GAUDI, "--assume", "host_us=15600").out


def test_shares_and_gaps_change_predictions_and_no_floor(shell: Shell) -> None:
    whole = shell(*GAUDI, "--json").json
    told = ("--assume", "read_share=0.5", "--assume", "layer_us=20", "--assume", "product_share=0.25")
    found = shell(*GAUDI, *told, "--json").json
    for slow, fast in zip(found["decode"], whole["decode"], strict=True):
        assert slow["seconds"]["between kernels"] == pytest.approx(62 * 20e-6)
        assert slow["seconds"]["head"] == pytest.approx(2 * fast["seconds"]["head"])
        assert slow["slowest"] == fast["slowest"]
    assert "between kernels" not in whole["decode"][0]["seconds"]
    assert found["layer"] == whole["layer"]
    shown = [[line for line in shell(*GAUDI, *words).out.splitlines() if "floor, ms" in line] for words in ((), told)]
    assert shown[0] == shown[1]
    assert len(shown[0]) == 2


def test_what_does_not_fit_is_said(shell: Shell) -> None:
    one = shell("--config", "released", "--device", "h200", "--json").json
    assert any("DOES NOT FIT" in note for note in one["notes"])
    assert one["tokens_that_fit"] == {"windowed": 0, "unwindowed": 0}
    many = shell(*GAUDI, "--batch", "64", "--context", "100000", "--json").json
    assert any("6,400,000 tokens of cache" in note for note in many["notes"])
    stages = shell("--config", "released", "--device", "h200", "--mesh", "pp=2,ep=2,tp=2", "--chunk", "0")
    assert "fullest stage" in stages.out
    assert "prefill" not in stages.out.replace("prefill step", "")


def test_dtypes_of_the_cache_and_formats_of_the_experts(shell: Shell) -> None:
    sizes = {
        kv: shell(*GAUDI, "--kv", kv, "--json").json["memory"][0]["kv_per_token"] for kv in ("bf16", "fp8", "float32")
    }
    assert sizes == {"bf16": 8192, "fp8": 4096, "float32": 16384}
    weights = [shell(*GAUDI, "--format", name, "--json").json["weights"] for name in ("quark-mxfp4", "nvfp4", "bf16")]
    assert weights == sorted(weights)
    assert "39.7" not in shell(*GAUDI, "--format", "nvfp4").out


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("--mesh", "ep=2;tp=4"), 1, "mesh 'ep=2;tp=4'"),
        (("--config", "released", "--mesh", "ep=3"), 1, "ep must be 1, 2, 4"),
        (("--mesh", "tp=8"), 1, "a block of 32 that shares a scale"),
        (("--mesh", "tp=16", "--format", "nvfp4"), 1, "a block of 16 that shares a scale"),
        (("--device", "tpu"), 1, "gaudi2, h200, cpu"),
        (("--format", "int4"), 1, "quark-mxfp4, nvfp4, bf16"),
        (("--kv", "int8"), 1, "bf16, fp8, float32"),
        (("--context", "0"), 1, "context is 0"),
        (("--context", "99999"), 1, "the model's limit"),
        (("--chunk", "99999"), 1, "chunk is 99999"),
        (("--batch", "1,x"), 1, "--batch '1,x'"),
        (("--batch", "0"), 1, "batch is 0"),
        (("--batch", ""), 1, "--batch ''"),
        (("--assume", "host_us"), 1, "'host_us': must be name=value"),
        (("--assume", "warp=9"), 1, "must be one of"),
        (("--assume", "bandwidth_gb_s=0"), 1, "above 0"),
        (("--assume", "read_share=1.5"), 1, "above 0 and at most 1"),
        (("--plot", "x.pdf"), 1, "must end in .png or .svg"),
        (("--plot", "/nowhere/x.png"), 1, "/nowhere/x.png"),
        (("--model", "x", "--config", "y"), 1, "not both"),
        (("--config", "/nowhere/config.json"), 1, "/nowhere/config.json"),
        (("--bogus",), 2, "--bogus"),
    ],
)
def test_what_cannot_be_planned_is_said(shell: Shell, words: tuple[str, ...], code: int, told: str) -> None:
    found = shell(*words)
    assert found.code == code
    assert told in found.err
    assert "Traceback" not in found.err
    assert found.out == ""


def test_texts_are_read_whole_or_refused() -> None:
    assert changes(["a=1", " b = 2.5e3"]) == {"a": 1.0, "b": 2500.0}
    assert sizes("16, 1,4,1") == [1, 4, 16]
    with pytest.raises(ValueError, match=r"'x=one'.*--assume y=…: given 2 times"):
        changes(["x=one", "y=1", "y=2"])
    for text in ("", ",", "1,,2", "-1", "1.5", "٣", "1" * 10):
        with pytest.raises(ValueError, match="--batch"):
            sizes(text)


def test_pictures_are_drawn_by_suffix(shell: Shell, tmp_path: Path) -> None:
    png, svg = tmp_path / "plan.png", tmp_path / "plan.svg"
    assert shell(*GAUDI, "--plot", str(png)).code == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    found = shell(*GAUDI, "--compare", "--plot", str(svg), "--json")
    assert found.json["weights"] == 70_838_728_704
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")


@pytest.mark.parametrize("compared", [True, False])
def test_a_picture_has_every_bar_and_its_title(compared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lengths of all pieces of a bar add up to the plan's total."""
    from matplotlib.figure import Figure

    drawn: list[Figure] = []

    def keep(figure: Figure, path: Path, metadata: object) -> None:
        drawn.append(figure)

    monkeypatch.setattr(Figure, "savefig", keep)
    setup, assumed = Setup(Config(), Mesh(2, 4)), assumptions("gaudi2", 8, {"host_us": 9.0, "layer_us": 5.0})
    found = plan(setup, "gaudi2", assumed)
    layouts = compare(setup, assumed) if compared else []
    draw(found, layouts, tmp_path / "x.png")
    (figure,) = drawn
    assert "Built with Muse Spark Open" in figure.get_suptitle()
    memory, time, *more = figure.axes
    assert len(more) == compared
    lengths = [0.0] * 4
    for bars in time.containers:
        for place, bar in enumerate(bars):
            lengths[place] += bar.get_width()
    assert lengths == pytest.approx([1e3 * step.total for step in found.decode])
    names = [text.get_text() for text in memory.get_yticklabels()]
    assert names == ([str(x.mesh) for x in layouts] if compared else ["ep=2,tp=4"])
    held = sum(bars[names.index("ep=2,tp=4")].get_width() for bars in memory.containers)
    assert held == pytest.approx(94.62), "weights, reserve and room for the cache are the memory"


def test_every_component_has_a_colour_of_its_own() -> None:
    assert {*COMPONENTS, *BUSY} <= set(COLOURS)
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_without_matplotlib_the_plot_is_refused_and_the_rest_works(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(name: str) -> ModuleSpec | None:
        return None if name == "matplotlib" else find_spec(name)

    monkeypatch.setattr("muse_fn.serve.drawing.find_spec", without)
    found = shell("--plot", str(tmp_path / "x.png"))
    assert (found.code, found.out) == (1, "")
    assert "pip install muse-fn[plot]" in found.err.replace("\n", "")
    assert not (tmp_path / "x.png").exists()
    assert shell().code == 0


def test_help(shell: Shell) -> None:
    found = shell("--help")
    assert found.code == 0
    for option in ("--model", "--mesh", "--device", "--format", "--assume", "--compare", "--plot", "--json"):
        assert option in found.out
