"""The house's conventions as tests: rooms, links, packaging map, who may import what, sizes, no modules of state."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("kernels", "params", "sharding", "kvcache", "muse_fn", "serve")  # imports run leftwards only
INNER = [room for room in ROOMS if room != "muse_fn"]
FILES = [file for room in ROOMS for file in sorted((ROOT / room).glob("*.py"))]
BENCH, TRAIN = (sorted((ROOT / folder).glob("*.py")) for folder in ("bench", "train"))
MAP = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
LINES_OF_A_FILE = 400
LINES_OF_A_FUNCTION = 40  # without signature and docstring

# Outside library -> the files that may import it; a folder stands for its files. What no row names is free.
OWNERS = {
    "optree": ["params/tree.py"],
    "asyncio": ["serve/"],
    "starlette": ["serve/"],
    "uvicorn": ["serve/"],
    "pydantic": ["serve/"],
    "llguidance": ["serve/grammar"],
    "prometheus_client": ["serve/metrics.py"],
    "typer": ["serve/"],
    "triton": ["kernels/"],
    "habana_frameworks": ["kernels/"],
    "torch.distributed": ["sharding/collectives.py"],
    "transformers": [],
}


def place(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def each(files: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("file", files, ids=place)


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported anywhere, inside functions too: "a.b" for `import a.b`, and for `from a import b`
    both "a" and "a.b", since b may be a module. Relative ones start with dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("__import__", "importlib.import_module"):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))


def room_of(module: str) -> str | None:
    """The room a dotted name lies in: "muse_fn.params.tree" and "params.tree" in params; None outside of the house."""
    top, _, rest = module.partition(".")
    inner = rest.partition(".")[0]
    if top == "muse_fn":
        return inner if inner in INNER else "muse_fn"
    return top if top in INNER else None


@pytest.mark.parametrize(
    ("module", "room"),
    [
        ("muse_fn", "muse_fn"),
        ("muse_fn.decoder", "muse_fn"),
        ("muse_fn.params", "params"),
        ("muse_fn.params.tree", "params"),
        ("params.tree", "params"),
        ("torch.nn", None),
        ("muse_fn_extras", None),
        ("serve", "serve"),
    ],
)
def test_room_of(module: str, room: str | None) -> None:
    assert room_of(module) == room


def test_imports_are_found_wherever_they_stand() -> None:
    source = "import a.b as c\nfrom d import e\ndef f():\n    import g\n    from .h import i\n    __import__('j')"
    assert set(imports(ast.parse(source))) == {"a.b", "d", "d.e", "g", ".h", ".h.i", "j"}


@each(FILES)
def test_rooms_import_leftwards_and_by_one_name(file: Path) -> None:
    here = ROOMS.index(file.parent.name)
    for module in imports(parsed(file)):
        assert not module.startswith("."), f"{module}: relative"
        room = room_of(module)
        if room is not None:
            assert module.partition(".")[0] == "muse_fn", f"{module}: two names for one file are two tree types"
            assert ROOMS.index(room) <= here, f"{module}: to the right of {file.parent.name}"


@each([file for file in FILES if file.name != "__init__.py"])
def test_rooms_do_not_import_from_the_front_page(file: Path) -> None:
    """muse_fn/__init__ re-exports names for users; inside, everything comes from the file that defines it."""
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            assert all(alias.name != "muse_fn" for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.module != "muse_fn", ast.unparse(node)


def test_no_cycles() -> None:
    names = {file: ".".join(("muse_fn", *file.relative_to(ROOT).with_suffix("").parts)) for file in FILES}
    names = {file: name.replace("muse_fn.muse_fn", "muse_fn").removesuffix(".__init__") for file, name in names.items()}
    known = set(names.values()) - {"muse_fn"}
    graph = {name: known.intersection(imports(parsed(file))) - {name} for file, name in names.items()}
    assert sum(map(len, graph.values())) > len(FILES), "the graph has edges"
    TopologicalSorter(graph).prepare()


@each(FILES)
def test_outside_libraries_have_owners(file: Path) -> None:
    for module in set(imports(parsed(file))):
        for library, owners in OWNERS.items():
            if module == library or module.startswith(f"{library}."):
                assert place(file).startswith(tuple(owners)), f"{module}: only {owners or 'tests'} may"


@each(FILES + TRAIN)
def test_no_modules_of_state(file: Path) -> None:
    """Parameters are trees and layers are functions: no nn.Module, and of torch.nn only its functions."""
    tree = parsed(file)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base) for base in node.bases]
            assert not any(re.search(r"\bModule$", base) for base in bases), f"{node.name}({', '.join(bases)})"
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith(("torch.nn.", "nn.")):
            assert ast.unparse(node).startswith("torch.nn.functional"), ast.unparse(node)
    nn = {module for module in imports(tree) if module == "torch.nn" or module.startswith("torch.nn.")}
    assert nn <= {"torch.nn.functional"}, nn


@each(FILES + BENCH)
def test_files_and_functions_are_short(file: Path) -> None:
    source = file.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= LINES_OF_A_FILE
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
            assert lines <= LINES_OF_A_FUNCTION, f"{node.name} has {lines} lines"


@each(FILES)
def test_every_file_says_what_it_is(file: Path) -> None:
    doc = ast.get_docstring(parsed(file))
    assert doc
    assert doc.partition("\n\n")[0].endswith((".", ":")), "whole sentences"


@each(FILES)
def test_every_public_function_has_a_docstring(file: Path) -> None:
    for node in parsed(file).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), node.name


def test_rooms_are_flat_and_every_file_is_in_one() -> None:
    """A second level would need a second map."""
    for room in ROOMS:
        assert (ROOT / room / "__init__.py").exists()
        folders = [path for path in (ROOT / room).iterdir() if path.is_dir() and not path.is_symlink()]
        assert [path for folder in folders for path in folder.rglob("*.py")] == []


def test_the_packaging_map_is_the_rooms() -> None:
    packages = {"muse_fn", *(f"muse_fn.{room}" for room in INNER)}
    assert set(MAP["packages"]) == packages
    assert MAP["package-dir"] == {package: package.rpartition(".")[2] for package in packages}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="source archives leave links out")
def test_the_links_are_the_packaging_map() -> None:
    links = {path.name: path.readlink().as_posix() for path in (ROOT / "muse_fn").iterdir() if path.is_symlink()}
    assert links == {room: f"../{room}" for room in INNER}


def test_the_wheel_installs_muse_fn_and_nothing_beside_it(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path / "source"
    hidden = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "tests")
    shutil.copytree(ROOT, source, symlinks=True, ignore=hidden)
    build = f"import setuptools.build_meta as b; b.build_wheel({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"muse_fn"}
    rooms = {place(file) if file.parent.name == "muse_fn" else f"muse_fn/{place(file)}" for file in FILES}
    assert {name for name in names if name.endswith(".py")} == rooms
    assert "muse_fn/py.typed" in names
    for data in (ROOT / "muse_fn" / "nano").iterdir():
        assert f"muse_fn/nano/{data.name}" in names
