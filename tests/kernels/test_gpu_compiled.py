"""Every Triton kernel, as configured in its file's COMPILED, goes through the compiler for sm_90; no GPU takes part.

The compiler needs a process in which Triton's interpreter is off: this file is also the program that such a process
runs. It prints what it has found, a JSON line for each configuration.
"""

import ast
import json
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
FILES = [file.stem for file in sorted((ROOT / "kernels").glob("gpu_*.py"))]
PROCESSES = 2
MOST_SHARED = 227 << 10  # bytes that a program may have on sm_90

Facts = dict[str, Any]


def why_not() -> str:
    """Why nothing can be compiled here; "" if it can."""
    here = platform.system(), platform.machine()
    if here != ("Linux", "x86_64"):
        return f"Triton's compiler is for Linux on x86_64, this is {' on '.join(here)}"
    return "Triton is not installed" if find_spec("triton") is None else ""


def kernels_in(file: str) -> set[str]:
    """The names of the kernels that are defined in a file."""
    tree = ast.parse((ROOT / "kernels" / f"{file}.py").read_text(encoding="utf-8"))
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return {name for name in names if name.startswith("_") and name.endswith("_kernel")}


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], options: dict[str, Any]) -> Any:
    """What the compiler makes of one configuration. Pointers lie at multiples of 16 bytes, as all tensors here do."""
    compiler, backends = import_module("triton.compiler"), import_module("triton.backends.compiler")
    names = list(kernel.arg_names)
    if twice := types.keys() & constants.keys() or {*names} ^ {*types, *constants}:
        raise ValueError(f"{sorted(twice)}: given twice, not given, or unknown")
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    attributes = {(n,): [["tt.divisibility", 16]] for n, name in enumerate(names) if signature[name].startswith("*")}
    source = compiler.ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    return compiler.compile(source, target=backends.GPUTarget("cuda", 90, 32), options=options)


def resources(cubin: bytes, folder: Path) -> dict[str, int]:
    """Registers and bytes of stack and local memory of a thread, and how many instructions of any turn of a loop go to
    memory for want of registers, as the tools beside Triton's assembler read them."""
    file = folder / f"{os.getpid()}.cubin"
    file.write_bytes(cubin)
    (package,) = import_module("triton").__path__
    tools = Path(package) / "backends" / "nvidia" / "bin"

    def said(tool: str, option: str) -> str:
        return subprocess.run([tools / tool, option, file], capture_output=True, text=True, check=True).stdout

    found = dict[str, str](re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said("cuobjdump", "--dump-resource-usage")))
    return {name: int(found[name]) for name in ("REG", "STACK", "LOCAL")} | {"spilled": spilled(said("nvdisasm", "-c"))}


def spilled(sass: str) -> int:
    """Of the loop that has most of them, loads from a thread's stack and stores to it."""
    labels, worst, lines = dict[str, int](), 0, sass.splitlines()
    for n, line in enumerate(lines):
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = n
        if (to := re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)) and to[1] in labels:
            worst = max(worst, sum(bool(re.search(r"\b(LDL|STL)\b", x)) for x in lines[labels[to[1]] : n]))
    return worst


def instructions(ptx: str) -> Facts:
    """How matrices are multiplied, where their left factors lie, how memory is read, and whether a kernel waits."""
    blocks = [block.splitlines() for block in re.split(r"^\s*\$L__BB", ptx, flags=re.MULTILINE)]
    multiply = re.compile(r"\b(wgmma\.mma_async|mma)\.sync")
    stores = 0  # to shared memory, before the last product of the same turn of a loop
    for lines in blocks:
        last = max((n for n, line in enumerate(lines) if multiply.search(line)), default=0)
        stores += sum("st.shared" in line or "stmatrix" in line for line in lines[:last])
    grouped = [line for line in ptx.splitlines() if "wgmma.mma_async" in line]
    return {
        "wgmma": len(grouped),
        "from_registers": sum("}, {%r" in line for line in grouped),
        "mma": len(re.findall(r"\bmma\.sync", ptx)),
        "stores_between": stores,
        "copies": Counter(int(n, 16) for n in re.findall(r"cp\.async\.c[ag]\.shared\.\S+ .*?, (0x\w+)", ptx)),
        "unwaited": can_end_unwaited(ptx),
        "early": len(re.findall(r"@p ld\.global", ptx.rpartition("griddepcontrol.wait")[0])),
        "early_wide": len(re.findall(r"ld\.global\.v4\.b32", ptx.rpartition("griddepcontrol.wait")[0])),
        "wide": Counter(re.findall(r"ld\.global(\.L2::256B)?\.v4\.b32", ptx)),
    }


def can_end_unwaited(ptx: str) -> bool:
    """Whether programs whose first id is 0 can end without having waited for the kernel before. If all of a launch did,
    it could be done before that kernel is, and the kernel behind, which waits for this launch alone, read too early."""
    lines = [line.strip() for line in ptx[ptx.index(".entry") :].splitlines()]
    labels = {label[1]: n for n, line in enumerate(lines) if (label := re.match(r"(\$L__BB\w+):", line))}
    zeros, known = {"%ctaid.x"}, dict[str, bool]()
    for line in lines:
        if (x := re.match(r"(?:mov|shl|mul\.lo)\.\w+\s+(%\w+), (%[\w.]+)", line)) and x[2] in zeros:
            zeros.add(x[1])
        if (x := re.match(r"setp\.(eq|ne)\.\w+\s+(%p\d+), (%\w+), 0;", line)) and x[3] in zeros:
            known[x[2]] = x[1] == "eq"
    ways, seen = [0], set[int]()
    while ways:
        n = ways.pop()
        if n in seen or "griddepcontrol.wait" in lines[n]:
            continue
        seen.add(n)
        if re.search(r"\bret;", lines[n]):
            return True
        jump = re.match(r"(?:@(!?)(%p\d+)\s+)?bra(?:\.uni)?\s+(\$L__BB\w+)", lines[n])
        does = None if jump is None or jump[2] not in known else known[jump[2]] != bool(jump[1])
        ways += [labels[jump[3]]] if jump and does is not False else []
        ways += [n + 1] if not jump or (jump[2] and does is not True) else []
    return False


def facts(file: str, place: int, folder: Path) -> Facts:
    """One configuration compiled, and what there is to say of it."""
    kernel, types, constants, options = import_module(f"muse_fn.kernels.{file}").COMPILED[place]
    told: list[tuple[str, float]] = []

    def tell(name: str, seconds: float) -> None:
        told.append((name, seconds))

    import_module("muse_fn.kernels.gpu").on_compile(tell)
    about: Facts = {"file": file, "place": place, "kernel": kernel.fn.__name__, "told": told}
    try:
        made = compiled(kernel, types, constants, options)
    except Exception as error:
        return {**about, "error": f"{type(error).__name__}: {error}"}
    used = resources(made.asm["cubin"], folder)
    constants = {name: value for name, value in constants.items() if isinstance(value, int)}
    return {**about, **used, **instructions(made.asm["ptx"]), "shared": made.metadata.shared, "constants": constants}


def main(share: int, folder: Path) -> None:
    """Compiles every PROCESSES-th configuration, from `share` on."""
    every = [
        (file, place)
        for file in FILES
        for place in range(len(getattr(import_module(f"muse_fn.kernels.{file}"), "COMPILED", ())))
    ]
    for file, place in every[share::PROCESSES]:
        print(json.dumps(facts(file, place, folder)), flush=True)


def everything(folder: Path) -> list[Facts]:
    """All configurations, compiled by two processes side by side into a cache that is empty at first."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment["TRITON_CACHE_DIR"] = str(folder)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.test_gpu_compiled", str(share), str(folder)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for share in range(PROCESSES)
    ]
    said = [process.communicate() for process in processes]
    for process, (_, errors) in zip(processes, said, strict=True):
        assert process.returncode == 0, errors
    found: list[Facts] = [json.loads(line) for out, _ in said for line in out.splitlines()]
    return sorted(found, key=lambda f: (f["file"], f["place"]))


def test_every_kernel_is_compiled_and_fits_the_device(tmp_path: Path) -> None:
    """One test, so that all is compiled once however tests are spread over processes."""
    if why := why_not():
        pytest.skip(why)
    found = everything(tmp_path)
    assert [f"{f['file']} {f['kernel']} {f['place']}: {f['error']}" for f in found if "error" in f] == []
    for file in FILES:
        assert {f["kernel"] for f in found if f["file"] == file} == kernels_in(file), file
    for f in found:  # no loop goes to memory for want of registers, but twice a turn in MXFP4's largest tiles
        is_largest = (f["constants"].get("FORMAT"), f["constants"].get("ROWS")) == (1, 128)
        has_sines = f["kernel"] == "_rotary_kernel"  # large angles are reduced with an array in a thread's own memory
        assert f["spilled"] <= 2 * is_largest + has_sines, f
        assert f["STACK"] <= (256 if is_largest else 64 if has_sines else 8), f
        assert f["LOCAL"] == 0, f
        for told, seconds in f["told"]:
            assert told.startswith(f["kernel"] + "("), f
            assert seconds > 0, f
        assert 0 < f["REG"] <= 255, f
        assert f["shared"] <= MOST_SHARED, f
        assert f["constants"]["PDL"], f
        assert not f["unwaited"], f
    # Of two configurations that are the same to the compiler the second is found in its cache.
    assert {f["kernel"] for f in found if len(f["told"]) == 1} == {f["kernel"] for f in found}
    products = [f for f in found if f["kernel"] in ("_gate_up_kernel", "_down_kernel")]
    assert {f["constants"]["FORMAT"] for f in products} == {0, 1, 2}
    assert {f["constants"]["ROWS"] for f in products} == {8, 16, 128}
    assert {f["constants"]["ALONE"] for f in products} == {True, False}
    for f in products:
        check_product(f)
    alone = [f for f in found if f["kernel"].startswith("_alone_")]
    assert {(f["constants"]["FORMAT"], f["constants"]["S"]) for f in alone} == {(1, 4), (1, 8), (2, 4), (2, 8)}
    for f in alone:
        check_alone(f)
    small = [f for f in found if f["constants"].get("CHUNKS")]
    assert {(f["constants"]["K"], f["constants"]["FLOATS"]) for f in small} == {(8192, 1), (4096, 0)}
    for f in small:
        check_direct(f)


def check_alone(f: Facts) -> None:
    """That what a thread has looked up stays in its registers, that codes are read by 16 bytes, and that inputs, which
    instructions read that the compiler thinks it may move, are read once they are there."""
    rows = f["constants"]["BN"]
    group = 2 * 4 * rows // 16  # products, of 16 rows, 32 inputs and 8 columns: of either sign, 128 inputs
    assert f["mma"] >= 2 * group, f  # of two groups a turn
    assert f["mma"] % group == 0, f
    assert f["wgmma"] == f["stores_between"] == 0, f
    assert f["wide"].get("", 0) >= rows // 8, f
    assert f["early"] == 0, f


def check_direct(f: Facts) -> None:
    """That weights read by 16 bytes stay in the registers that they came to, and that two groups of them are on their
    way before the inputs are there, but no inputs."""
    c = f["constants"]
    each = 2 * c["K"] // c["WARPS"] // 32  # products of 16 inputs
    assert f["mma"] == each, f
    assert f["wgmma"] == f["stores_between"] == 0, f
    assert f["wide"].get("", 0) >= each, f
    if not c["FLOATS"]:
        assert f["early"] == 0, f
        assert f["early_wide"] == 2 * c["CHUNKS"], f


def check_product(f: Facts) -> None:
    """That a product of experts is what kernels/gpu_unpack.py renumbers columns for: what a thread has unpacked stays
    in its registers, and all is read by 16 bytes."""
    c = f["constants"]
    copied = f["copies"].get("16", 0) * 16 * 32 * c["WARPS"]
    if c["FORMAT"] == 0:
        assert f["wgmma"] > 0, f
        assert copied >= c["STAGES"] * 64 * 2 * (c["ROWS"] + c["BN"]), f
        return
    if c["K"] > 128 * c["AT_ONCE"] * (c["WARPS"] if c["FEW"] else 1):  # without a loop inputs are stored there
        assert f["stores_between"] == 0, f
    if c["FEW"]:
        # A turn's products, of 16 rows, 16 inputs and 8 routes, in the short way and, for MXFP4, in the long one.
        ways, turn = 3 - c["FORMAT"], c["AT_ONCE"] * 8 * c["BN"] // 16
        assert f["wgmma"] == 0, f
        assert f["mma"] >= ways * turn, f
        assert f["mma"] % turn == 0, f
        assert f["wide"].get(".L2::256B", 0) >= ways * c["AT_ONCE"] * c["BN"] // 8, f
    else:
        assert f["wgmma"] == f["from_registers"] > 0, f
        assert f["mma"] == 0, f
        # 128 inputs are two products of 64, each of four steps for every 64 rows; with their codes they are all that
        # the copies of a stage bring, but for the scales, which are narrower.
        assert f["wgmma"] % (8 * c["BN"] // 64) == 0, f
        assert copied >= c["STAGES"] * (128 * c["ROWS"] * 2 + 64 * c["BN"]), f


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
