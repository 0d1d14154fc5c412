"""What `config.json` says about quantisation, against what the tensors are. They decide; a contradiction is refused."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from muse_fn.params.config import ConfigError, read_json
from muse_fn.params.formats import Format

Object = dict[str, Any]
Claim = tuple[str, object, object]  # field, value found, value needed
HF_QUANT = "hf_quant_config.json"


def _object(found: object) -> Object:
    return cast("Object", found) if isinstance(found, dict) else {}


def _quark(quant: Object) -> Iterator[Claim]:
    """Every weight scheme must be E2M1 with an E8M0 exponent per 32."""
    schemes = {"global_quant_config": quant.get("global_quant_config")}
    for table in ("layer_quant_config", "layer_type_quant_config"):
        schemes |= {f"{table}[{name!r}]": scheme for name, scheme in _object(quant.get(table)).items()}
    needed = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
    for where, scheme in schemes.items():
        weight: Any = _object(scheme).get("weight")
        weight = cast("list[Any]", weight)[0] if isinstance(weight, list) and weight else weight
        if isinstance(weight, dict):
            yield from _claims(f"{where}.weight", cast("Object", weight), needed)


def _modelopt(quant: Object) -> Iterator[Claim]:
    """NVFP4 with a scale per 16, said directly or by groups."""
    yield from _claims("", quant, {"quant_algo": "NVFP4", "group_size": 16})
    yield from _groups(quant, 16)


def _compressed(quant: Object) -> Iterator[Claim]:
    """Four-bit floats in one of two packed forms."""
    blocks = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}
    form = quant.get("format")
    if form not in blocks:
        yield "format", form, " or ".join(blocks)
        return
    yield from _groups(quant, blocks[form])


def _groups(quant: Object, block: int) -> Iterator[Claim]:
    for name, group in _object(quant.get("config_groups")).items():
        weights = _object(_object(group).get("weights"))
        yield from _claims(
            f"config_groups[{name!r}].weights", weights, {"num_bits": 4, "type": "float", "group_size": block}
        )


def _claims(where: str, found: Object, needed: Object) -> Iterator[Claim]:
    """The fields that are there; an absent one claims nothing."""
    for key, value in needed.items():
        if found.get(key) is not None:
            yield f"{where}.{key}".lstrip("."), found[key], value


METHODS: dict[str, Callable[[Object], Iterator[Claim]]] = {
    "quark": _quark,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "compressed-tensors": _compressed,
}
# What the tensors of a method, or of a method's form, are in; names of the table of formats.
STORED_AS = {
    "quark": "quark MXFP4",
    "modelopt": "modelopt NVFP4",
    "modelopt_fp4": "modelopt NVFP4",
    "nvfp4-pack-quantized": "compressed-tensors NVFP4",
    "mxfp4-pack-quantized": "compressed-tensors MXFP4",
}


def problems_of_quantization(folder: Path, whole: Object, formats: Iterable[Format]) -> list[str]:
    """Every contradiction between the tensors' formats and `config.json` or `hf_quant_config.json`, as sentences."""
    packed = sorted({form.name for form in formats if form.node != "plain"})
    problems: list[str] = []
    if whole.get("quantization_config") is not None:
        problems += _problems_of("config.json: quantization_config", whole["quantization_config"], None, packed)
    if (folder / HF_QUANT).exists():
        try:
            found = read_json(folder / HF_QUANT).get("quantization")
        except ConfigError as error:
            return [*problems, str(error)]
        problems += _problems_of(f"{HF_QUANT}: quantization", found, "modelopt", packed)
    return problems


def _problems_of(where: str, found: object, method: str | None, packed: list[str]) -> list[str]:
    if not isinstance(found, dict):
        return [f"{where} is {found!r}: must be an object"]
    quant = _object(found)
    method = method or quant.get("quant_method")
    if method not in METHODS:
        return [f"{where}.quant_method is {method!r}: must be one of {', '.join(METHODS)}"]
    problems = [f"{where}.{f} is {v!r}: must be {want!r}" for f, v, want in METHODS[method](quant) if v != want]
    stored_as = STORED_AS.get(method) or STORED_AS.get(quant.get("format", ""))
    alien = [name for name in packed if name != stored_as]
    if alien and not problems:
        problems.append(f"{where} says {stored_as}, but there are tensors in {', '.join(alien)}")
    return problems


def quark_config(exclude: list[str]) -> Object:
    """The `quantization_config` of a Quark checkpoint that packs all modules but these.

    It declares what the published one does, weights and activations in MXFP4; readers choose to keep activations wide.
    """
    scheme = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
    return {
        "quant_method": "quark",
        "global_quant_config": {
            "weight": {**scheme, "is_dynamic": False},
            "input_tensors": {**scheme, "is_dynamic": True},
            "output_tensors": None,
            "bias": None,
        },
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": exclude,
        "export": {"kv_cache_group": [], "pack_method": "reorder"},
    }


def modelopt_config(exclude: list[str]) -> Object:
    """The `quantization_config` of a modelopt checkpoint that packs all modules but these."""
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": exclude,
    }
