"""A tree of parameters in, a folder in one of the published layouts out: all of it or nothing."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muse_fn.kernels.packed import Weight, logical_shape
from muse_fn.params.checkpoint import INDEX, SINGLE
from muse_fn.params.config import Config
from muse_fn.params.formats import FORMATS, Format, Part, Shape, Spelling, allowed_shapes
from muse_fn.params.matching import Matrix, matrices_of
from muse_fn.params.quantise import check_widths, is_packable, to_node
from muse_fn.params.quantization import HF_QUANT, modelopt_config, quark_config
from muse_fn.params.read import DTYPES, Progress
from muse_fn.params.replace import replacing
from muse_fn.params.safetensors_header import BITS, header_bytes
from muse_fn.params.schema import Leaf, leaves
from muse_fn.params.towers import PREFIXES as TOWER_PREFIXES
from muse_fn.params.tree import Params, map_tensors, named

SHARD_BYTES = 5_000_000_000
NOTICE = "Built with Muse Spark Open"


@dataclass(frozen=True)
class Layout:
    """One argument `format` of `write_checkpoint`."""

    dtype: str  # of plain tensors; router and residual gates are F32
    spelling: Spelling  # of experts
    packed: Format | None = None  # of the inner layers' experts
    config: Callable[[list[str]], dict[str, Any]] | None = None  # excluded modules -> quantization_config


def _row(name: str, spelling: Spelling) -> Format:
    return next(row for row in FORMATS if row.name == name and row.spelling == spelling)


LAYOUTS = {
    "float32": Layout("F32", "stacked"),
    "bf16": Layout("BF16", "stacked"),
    "quark-mxfp4": Layout("BF16", "each", _row("quark MXFP4", "each"), quark_config),
    "nvfp4": Layout("BF16", "stacked", _row("modelopt NVFP4", "stacked"), modelopt_config),
}


@dataclass(frozen=True)
class Group:
    """Tensors that are made together: one parameter, or what belongs to one expert of it."""

    tensors: dict[str, tuple[str, Shape]]  # name -> dtype, shape
    make: Callable[[], Iterator[Tensor]]  # in the same order

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(prod(shape) * BITS[dtype] // 8 for dtype, shape in self.tensors.values())


def write_checkpoint(
    path: str | Path,
    params: Params,
    config: Config,
    format: str = "bf16",
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> None:
    """Writes the folder `path` as "float32", "bf16", "quark-mxfp4" or "nvfp4", sharded above `shard_bytes`.

    Packed parameters are unpacked, or kept byte for byte if the format packs them the same way; plain experts of the
    inner layers are packed if the format asks for it. The folder appears under its name when complete. A checkpoint
    that is there is replaced, its other files (tokenizer, template) kept; any other folder that is not empty is
    refused. Raises ValueError before anything is written.
    """
    if format not in LAYOUTS:
        raise ValueError(f"format is {format!r}: must be one of {', '.join(LAYOUTS)}")
    layout = LAYOUTS[format]
    _check(params, config)
    if layout.packed:
        check_widths(config, layout.packed.node)
    shards = list(_shards(_groups(params, config, layout), shard_bytes))
    with replacing(Path(path)) as folder:
        _write_shards(folder, shards, progress)
        for name, content in _config_files(config, layout).items():
            (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _check(params: Params, config: Config) -> None:
    """Raises ValueError naming every parameter that is not what the config asks for."""
    found = {path: logical_shape(weight) for path, weight in named(params).items()}
    wanted = {leaf.path: leaf.shape for leaf in leaves(config)}
    problems = [
        f"{path}: shape is {list(found[path]) if path in found else 'none'}, the config asks for "
        f"{list(wanted[path]) if path in wanted else 'none'}"
        for path in {**wanted, **found}
        if found.get(path) != wanted.get(path)
    ]
    if problems:
        raise ValueError("these parameters do not fit the config:\n  " + "\n  ".join(problems))


def _groups(params: Params, config: Config, layout: Layout) -> Iterator[Group]:
    values = named(params)
    for leaf in leaves(config):
        packed = layout.packed if is_packable(leaf, config) else None
        spelling = layout.spelling if leaf.row.each else "stacked"
        form = packed or _row("plain", spelling)
        dtype = "F32" if leaf.row.dtype == "float32" else layout.dtype
        for _, matrices in groupby(matrices_of(leaf, spelling), key=lambda matrix: matrix.expert):
            yield _group(leaf, list(matrices), values[leaf.path], form, dtype)
    if config.tie_word_embeddings:  # transformers never ties the head of this architecture and must find it
        embed = params.embed
        assert isinstance(embed, Tensor), "every parameter was found"
        head = {"lm_head.weight": (layout.dtype, tuple(embed.shape))}
        yield Group(head, lambda: iter([embed.to(DTYPES[layout.dtype])]))


def _group(leaf: Leaf, matrices: list[Matrix], weight: Weight, form: Format, dtype: str) -> Group:
    tensors = {
        matrix.base + part.suffix: (
            dtype if part.role == "values" else part.dtypes[0],
            allowed_shapes(part, form.block, matrix.shape, matrix.matrices)[0],
        )
        for matrix in matrices
        for part in form.parts
    }

    def make() -> Iterator[Tensor]:
        expert = matrices[0].expert
        one = weight if expert is None else map_tensors(lambda t: t[expert : expert + 1], weight)
        node = to_node(leaf, one, form.node, DTYPES[dtype])
        fields = {"values": node} if isinstance(node, Tensor) else node._asdict()
        for matrix in matrices:
            for part in form.parts:
                shape = tensors[matrix.base + part.suffix][1]
                yield torch.ones(shape) if part.role == "ignored" else _cut(fields, matrix, part).reshape(shape)

    return Group(tensors, make)


def _cut(fields: Mapping[str, Any], matrix: Matrix, part: Part) -> Tensor:
    """What a matrix's part holds, out of the tensors of the whole parameter or of its one expert."""
    at = matrix.at(part)
    return fields[part.role][(0, *at[1:]) if at else ()]


def _shards(groups: Iterator[Group], limit: int) -> Iterator[list[Group]]:
    """Groups in order, as many to a shard as fit; one that is larger has a shard to itself."""
    shard: list[Group] = []
    size = 0
    for group in groups:
        if shard and size + group.size > limit:
            yield shard
            shard, size = [], 0
        shard.append(group)
        size += group.size
    yield shard


def _write_shards(folder: Path, shards: list[list[Group]], progress: Progress | None) -> None:
    names = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    names = names if len(names) > 1 else [SINGLE]
    total = sum(group.size for shard in shards for group in shard)
    done = 0
    for name, shard in zip(names, shards, strict=True):
        for group in _write_shard(folder / name, shard):
            done += group.size
            if progress:
                progress(done, total, next(iter(group.tensors)))
    if len(names) > 1:
        pairs = zip(names, shards, strict=True)
        where = {tensor: name for name, shard in pairs for group in shard for tensor in group.tensors}
        index = {"metadata": {"total_size": total, "notice": NOTICE}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_shard(path: Path, shard: list[Group]) -> Iterator[Group]:
    """Writes one file, one group in memory at a time; yields each group written."""
    every = {name: tensor for group in shard for name, tensor in group.tensors.items()}
    tensors = dict(sorted(every.items(), key=lambda item: -BITS[item[1][0]]))  # wide types first keep all aligned
    header = header_bytes(tensors, {"format": "pt", "notice": NOTICE})
    at, starts = len(header), dict[str, int]()
    for name, (dtype, shape) in tensors.items():
        starts[name] = at
        at += prod(shape) * BITS[dtype] // 8
    with path.open("xb") as file:
        file.write(header)
        for group in shard:
            for (name, (dtype, shape)), tensor in zip(group.tensors.items(), group.make(), strict=True):
                assert tensor.dtype == DTYPES[dtype], f"{name=} {tensor.dtype=}"
                assert tuple(tensor.shape) == shape, f"{name=} {tensor.shape=}"
                file.seek(starts[name])
                file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            yield group
        file.flush()
        os.fsync(file.fileno())


def _config_files(config: Config, layout: Layout) -> dict[str, dict[str, Any]]:
    """`config.json`, and for modelopt the file that repeats its quantisation.

    The towers are not written. Their sub-configs are there because transformers builds the whole model, and as small
    as it accepts; the audio width must be the text width.
    """
    whole: dict[str, Any] = {
        "architectures": ["MuseSparkForConditionalGeneration"],
        "model_type": "muse_spark",
        "dtype": {"F32": "float32", "BF16": "bfloat16"}[layout.dtype],
        "tie_word_embeddings": config.tie_word_embeddings,
        "text_config": config.to_json(),
        "vision_config": {**TINY_VISION, "model_type": "muse_spark_vision"},
        "audio_config": {**TINY_AUDIO, "model_type": "muse_spark_audio", "out_hidden_size": config.hidden_size},
        "out_hidden_size": TINY_VISION["hidden_size"] * TINY_VISION["merge_size"] ** 2,
        "projector_hidden_size": 16,
    }
    if not (layout.config and layout.packed):
        return {"config.json": whole}
    quant = layout.config(_excluded(config))
    files = {"config.json": {**whole, "quantization_config": quant}}
    if layout.packed.name == "modelopt NVFP4":
        files[HF_QUANT] = {"producer": {"name": "muse-fn"}, "quantization": quant}
    return files


def _excluded(config: Config) -> list[str]:
    """Modules that are not packed, as other readers match them: a layer's experts by name, all else by pattern.

    Norms are no modules of theirs, and "…experts.post_expert_norm" would exclude the experts with it.
    """
    modules: dict[str, None] = {}
    for leaf in leaves(config):
        if leaf.row.each and not is_packable(leaf, config):
            modules[leaf.name.rpartition(".")[0]] = None
        elif not leaf.row.each and len(leaf.shape) > 1:
            modules[leaf.row.name.replace("{i}", "*").removesuffix(".weight")] = None
    return [*modules, *(f"{prefix}*" for prefix in TOWER_PREFIXES)]


TINY_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "patch_size": 2,
    "patch_temporal": 1,
    "merge_size": 2,
    "pos_emb_height": 2,
    "pos_emb_width": 2,
    "max_position_embeddings": 4,
}
TINY_AUDIO = {"hidden_sizes": [8], "depths": [1], "patch_sizes": [4], "num_hidden_layers": 1}
