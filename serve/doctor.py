"""`muse-fn doctor`: what this machine has, and which forms of the operations run on it. Starts and fetches nothing."""

import json
import os
import platform
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from muse_fn.kernels import cpu, cpu_calls
from muse_fn.kernels.select import Ops, select, why_no_triton
from muse_fn.serve.inspect import checkpoint_of
from muse_fn.serve.options import EMBEDDED, Json, out, show_banner

LIBRARIES = {  # that may be absent, and what for
    "triton": "forms for CUDA devices",
    "numba": "forms for few rows in bfloat16 on a CPU",
    "uvloop": "a faster event loop for the server",
    "llguidance": "enforced tools, schemas and grammars",
    "matplotlib": "plots of plan and bench",
    "transformers": "the tests, as the implementation to compare with",
}
NEVER_RUN = "nothing here has ever run on one"
CAPTURES = {
    "cpu": "cpu: the function itself, under the rules of a graph",
    "cuda": "cuda: a CUDA graph",
    "hpu": "none yet",
}


def doctor(as_json: Json = False) -> None:
    """What this machine has and which forms of the operations are used on it, and why."""
    found = report()
    if as_json:
        print(json.dumps(found))
        return
    show_banner()
    out.print(table(found))


def report() -> dict[str, Any]:
    """All findings as JSON values; sizes in bytes."""
    cuda = [_cuda(n) for n in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    absent = {} if cuda else {"cuda": why_no_triton(torch.device("cuda"))}
    return {
        "built_with": "Muse Spark Open",
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "torch": {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip},
        "devices": [_processor(), *cuda],
        "absent": {**absent, "hpu": NEVER_RUN},
        "libraries": {name: find_spec(name) is not None for name in LIBRARIES},
        "embedded": _embedded(EMBEDDED),
    }


def _processor() -> dict[str, Any]:
    has_units = cpu.has_matrix_units()
    products = "W xᵀ while rows are few: the weight is not packed anew" if has_units else "x Wᵀ, whatever the rows"
    return {
        "device": "cpu",
        "name": _name_of_processor(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "matrix_units": has_units,
        "bfloat16_products": products,
        "why_no_numba": cpu_calls.why_not() or None,
        **_forms(torch.device("cpu")),
    }


def _name_of_processor(file: Path = Path("/proc/cpuinfo")) -> str:
    """As the system has it; on Linux what Python calls the processor is often empty."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.processor() or platform.machine())


def _cuda(number: int) -> dict[str, Any]:
    where, found = torch.device("cuda", number), torch.cuda.get_device_properties(number)
    return {
        "device": str(where),
        "name": found.name,
        "memory": found.total_memory,
        "compute_capability": f"{found.major}.{found.minor}",
        "why_no_triton": why_no_triton(where) or None,
        **_forms(where),
    }


def _forms(where: torch.device) -> dict[str, Any]:
    """The table of a device without gradients, where each operation is from, and how steps are captured."""
    with torch.inference_mode():
        ops = select(where)
    return {"why": ops.why, "operations": origins(ops), "captures": CAPTURES[where.type]}


def origins(ops: Ops) -> dict[str, str]:
    """For each operation that the table has the file of its form, such as kernels/cpu.py."""
    found: dict[str, str] = {}
    for field in fields(Ops):
        form: Any = getattr(ops, field.name)
        if field.name != "why" and form is not None:
            inner = form.keywords.values() if isinstance(form, partial) else ()
            made_of = next(iter(inner), form)  # a plain form of another form's products
            found[field.name] = f"{made_of.__module__.removeprefix('muse_fn.').replace('.', '/')}.py"
    return found


def _embedded(folder: Path) -> dict[str, Any]:
    """Whether the embedded checkpoint is there, by its headers."""
    try:
        checkpoint = checkpoint_of(folder)
        problem = None if checkpoint else "there are no weights"
    except (OSError, ValueError) as error:
        checkpoint, problem = None, str(error)
    size = sum(plan.bytes for plan in checkpoint.plans) if checkpoint else 0
    return {"folder": str(folder), "is_present": checkpoint is not None, "bytes": size, "problem": problem}


def table(found: dict[str, Any]) -> Table:
    """The report for a reader."""
    grid = Table(show_header=False)
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    build = found["torch"]
    kind = f"CUDA {build['cuda']}" if build["cuda"] else f"ROCm {build['hip']}" if build["hip"] else "CPU only"
    grid.add_row("torch", f"{build['version']}, built for {kind}; Python {found['python']} on {found['system']}")
    for device in found["devices"]:
        grid.add_section()
        for name, text in _lines_of(device):
            grid.add_row(name, text)
    grid.add_section()
    for name, why in found["absent"].items():
        grid.add_row(name, why)
    grid.add_section()
    for name, is_installed in found["libraries"].items():
        grid.add_row(name, f"{'installed' if is_installed else 'not installed'}: {LIBRARIES[name]}")
    grid.add_section()
    model = found["embedded"]
    said = f"present, {model['bytes']:,} bytes of tensors" if model["is_present"] else f"missing: {model['problem']}"
    grid.add_row("embedded model", said)
    return grid


def _lines_of(device: dict[str, Any]) -> list[tuple[str, str]]:
    files: dict[str, list[str]] = {}
    for operation, file in device["operations"].items():
        files.setdefault(file, []).append(operation)
    if device["device"] == "cpu":
        units = "with" if device["matrix_units"] else "without"
        about = f"{device['name']}, {device['threads']} threads on {device['processors']} processors"
        products = f"{device['bfloat16_products']} ({units} matrix units, AMX); of few rows compiled by Numba"
        why = device["why_no_numba"]
        extra = [("bfloat16 products", products if not why else products.partition(";")[0])]
        extra += [("no compiled forms", why)] if why else []
    else:
        size = f"{device['memory'] / 2**30:,.0f} GiB"
        about = f"{device['name']}, {size}, compute capability {device['compute_capability']}"
        extra = [("no Triton forms", why)] if (why := device["why_no_triton"]) else []
    forms = [f"{file}: {', '.join(names)}" for file, names in files.items()]
    return [
        (device["device"], about),
        *extra,
        ("operations", device["why"]),
        ("", "\n".join(forms)),
        ("captures", device["captures"]),
    ]
