"""Damaged checkpoints: the layout that is damaged, the damage, and words that the refusal must hold."""

import struct

import torch

from muse_fn.params.safetensors_header import MAX_HEADER
from tests.damage import (
    DOWN,
    EMBED,
    FIRST,
    GATE,
    HEAD,
    NORM,
    UP,
    Damage,
    all_of,
    both_spellings,
    config,
    copy_into_other_shard,
    drop,
    header,
    in_shard,
    insert_gap,
    link_outside,
    link_to_itself,
    move_offsets,
    only_foreign_weights,
    put,
    raw,
    rename,
    replace_by_folder,
    replace_by_pipe,
    text,
    twice_in_header,
    weight_map,
)
from tests.tiny_checkpoint import EXPERTS, FILE, INDEX, LAYER, write_raw

Case = tuple[str, Damage, tuple[str, ...]]

CASES: dict[str, Case] = {
    # The file
    "zero bytes": ("bf16", raw(lambda b: b""), (FILE, "0 bytes")),
    "seven bytes": ("bf16", raw(lambda b: b[:7]), (FILE, "7 bytes")),
    "a folder": ("bf16", replace_by_folder, (FILE, "a folder")),
    "a pipe": ("bf16", replace_by_pipe, (FILE, "no regular file")),
    "a header of 2^40 bytes": ("bf16", raw(lambda b: struct.pack("<Q", 2**40) + b[8:]), (FILE, str(2**40))),
    "a header one byte too long": (
        "bf16",
        raw(lambda b: struct.pack("<Q", MAX_HEADER + 1) + b[8:]),
        (str(MAX_HEADER),),
    ),
    "a header beyond the file": (
        "bf16",
        raw(lambda b: struct.pack("<Q", len(b)) + b[8:]),
        (FILE, "longer than the file"),
    ),
    "text instead of a header": (
        "bf16",
        raw(lambda b: b"version https://git-lfs.github.com/spec/v1"),
        (FILE, "safetensors"),
    ),
    "cut in the data": ("bf16", raw(lambda b: b[:-5]), (FILE, "cut at")),
    "cut in the header": ("bf16", raw(lambda b: b[:100]), (FILE, "longer than the file")),
    "trailing bytes": ("bf16", raw(lambda b: b + b"junk"), (FILE, "4 bytes follow the last tensor")),
    # The header
    "header is a list": ("bf16", lambda f: write_raw(f / FILE, b"[]", b""), (FILE, "must be a JSON object")),
    "header is no JSON": ("bf16", lambda f: write_raw(f / FILE, b"{x}", b""), (FILE, "not JSON")),
    "header is no text": ("bf16", lambda f: write_raw(f / FILE, b"\xff\xfe{}", b""), (FILE, "not JSON")),
    "header of brackets": ("bf16", lambda f: write_raw(f / FILE, b"[" * 200_000, b""), (FILE, "not JSON")),
    "header with one huge number": (
        "bf16",
        lambda f: write_raw(f / FILE, b'{"a":' + b"9" * 10**5 + b"}", b""),
        (FILE,),
    ),
    "a name twice": ("bf16", twice_in_header, (FILE, NORM, "twice")),
    "entry is no object": ("bf16", header(lambda h: h.update({NORM: 3})), (FILE, NORM, "object")),
    "unknown dtype": ("bf16", header(lambda h: h[NORM].update(dtype="BF17")), (FILE, NORM, "BF17")),
    "dtype is a number": ("bf16", header(lambda h: h[NORM].update(dtype=16)), (FILE, NORM, "dtype is 16")),
    "no dtype": ("bf16", header(lambda h: h[NORM].pop("dtype")), (FILE, NORM, "dtype is None")),
    "negative shape": ("bf16", header(lambda h: h[NORM].update(shape=[-32])), (FILE, NORM, "[-32]")),
    "shape of fractions": ("bf16", header(lambda h: h[NORM].update(shape=[32.0])), (FILE, NORM, "[32.0]")),
    "shape of booleans": ("bf16", header(lambda h: h[NORM].update(shape=[True])), (FILE, NORM, "[True]")),
    "shape that is no list": ("bf16", header(lambda h: h[NORM].update(shape="32")), (FILE, NORM, "'32'")),
    "shape larger than the data": (
        "bf16",
        header(lambda h: h[NORM].update(shape=[2**70])),
        (FILE, NORM, "data_offsets hold 64"),
    ),
    "offsets backwards": ("bf16", header(lambda h: h[NORM]["data_offsets"].reverse()), (FILE, NORM, "data_offsets")),
    "one offset": ("bf16", header(lambda h: h[NORM]["data_offsets"].pop()), (FILE, NORM, "data_offsets")),
    "metadata of numbers": ("bf16", header(lambda h: h.update(__metadata__={"a": 1})), (FILE, "__metadata__")),
    "overlap": ("bf16", move_offsets(NORM, -2), (FILE, NORM, "overlaps", "by 2 bytes")),
    "gap": ("bf16", insert_gap, (FILE, "begins 8 bytes after the end of")),
    "tensor beyond the end": ("bf16", move_offsets(NORM, 10**9), (FILE, NORM, "the file is cut at")),
    # The index
    "a shard is absent": ("sharded", in_shard(NORM, lambda f, s: (f / s).unlink()), (INDEX, FIRST[:6], "no such file")),
    "index is no JSON": ("sharded", raw(lambda b: b[:-9], INDEX), (INDEX, "not JSON")),
    "index without map": ("sharded", config(lambda i: i.pop("weight_map"), INDEX), (INDEX, "weight_map")),
    "index with an empty map": ("sharded", weight_map(lambda m: m.clear()), (INDEX, "weight_map")),
    "index names a number": ("sharded", weight_map(lambda m: m.update({NORM: 3})), (INDEX, NORM)),
    "index leaves the folder": (
        "sharded",
        weight_map(lambda m: m.update({NORM: "../x.safetensors"})),
        (INDEX, "../x.safetensors", "inside"),
    ),
    "index leaves by a detour": (
        "sharded",
        weight_map(lambda m: m.update({NORM: "a/../../x.safetensors"})),
        ("a/../../x", "inside"),
    ),
    "index has an absolute path": (
        "sharded",
        weight_map(lambda m: m.update({NORM: "/etc/passwd"})),
        (INDEX, "/etc/passwd", "inside"),
    ),
    "index has a backslash": (
        "sharded",
        weight_map(lambda m: m.update({NORM: "..\\x.safetensors"})),
        (INDEX, "inside"),
    ),
    "a link leaves the folder": (
        "sharded",
        in_shard(NORM, link_outside),
        (INDEX, "elsewhere.safetensors", "outside the folder"),
    ),
    "the only file is a link out": ("bf16", lambda f: link_outside(f, FILE), (FILE, "elsewhere.safetensors")),
    "a link in a circle": ("sharded", in_shard(NORM, link_to_itself), (INDEX, FIRST[:6], "cannot be found")),
    "index names half a pair": (
        "sharded",
        weight_map(lambda m: m.update({NORM: "\ud800"})),
        (INDEX, "cannot be found"),
    ),
    "index names an endless file": (
        "sharded",
        weight_map(lambda m: m.update({NORM: "x" * 999})),
        (INDEX, "cannot be found"),
    ),
    "index names the folder": ("sharded", weight_map(lambda m: m.update({NORM: "."})), ("a folder",)),
    "index is a folder": ("bf16", lambda f: (f / INDEX).mkdir(), (INDEX, "no regular file")),
    "index is a link out": ("sharded", lambda f: link_outside(f, INDEX), (INDEX, "outside the folder")),
    "listed but not there": (
        "sharded",
        weight_map(lambda m: m.update(ghost=m[NORM])),
        ("ghost", f"listed in {INDEX}", FIRST[:6]),
    ),
    "there but not listed": ("sharded", weight_map(lambda m: m.pop(NORM)), (NORM, f"not listed in {INDEX}")),
    "listed for another shard": ("sharded", weight_map(lambda m: m.update({NORM: m[EMBED]})), (NORM, "listed in")),
    "in two shards": ("sharded", in_shard(NORM, copy_into_other_shard), (NORM, "also in model-0")),
    "a name twice in the index": (
        "sharded",
        raw(lambda b: b.replace(b'"weight_map": {', b'"weight_map": {"%s": "x",' % NORM.encode()), INDEX),
        (INDEX, NORM, "twice"),
    ),
    "neither index nor model.safetensors": (
        "bf16",
        only_foreign_weights,
        (INDEX, FILE, "pytorch_model.bin", "weights.safetensors"),
    ),
    "nothing but a config": ("bf16", lambda f: (f / FILE).unlink(), ("found: config.json",)),
    # The tensors
    "a norm is missing": ("bf16", drop(NORM), (f"{NORM}: missing",)),
    "stacked experts are missing": (
        "bf16",
        drop(f"{EXPERTS}gate_up_proj"),
        (f"{EXPERTS}gate_up_proj: missing", f"{EXPERTS}0.gate_proj.weight"),
    ),
    "an extra tensor": ("bf16", put("lm_head.bias", torch.clone, NORM), (f"{FILE}: lm_head.bias: unknown tensor",)),
    "a renamed tensor": ("bf16", rename(NORM, "model.norm.weight"), (f"{NORM}: missing", "model.norm.weight: unknown")),
    "a layer too many": (
        "bf16",
        rename(f"{LAYER}input_layernorm.weight", "model.language_model.layers.4.input_layernorm.weight"),
        ("layers.4.input_layernorm.weight: unknown", f"{LAYER}input_layernorm.weight: missing"),
    ),
    "wrong shape": ("bf16", put(NORM, lambda t: t[:31]), (f"{FILE}: {NORM}", "[31]", "[32]")),
    "transposed": (
        "bf16",
        put(f"{LAYER}mlp.pre_expert_proj.weight", lambda t: t.T),
        ("pre_expert_proj", "[32, 64]", "[64, 32]"),
    ),
    "a dimension too many": ("bf16", put(NORM, lambda t: t.unsqueeze(0)), (NORM, "[1, 32]", "[32]")),
    "wrong dtype": ("bf16", put(NORM, lambda t: t.long()), (f"{FILE}: {NORM}", "I64", "BF16 or F16 or F32")),
    "codes for a projection": (
        "bf16",
        put(f"{LAYER}self_attn.q_proj.weight", lambda t: t.view(torch.uint8)),
        ("q_proj", "U8"),
    ),
    "both spellings": (
        "bf16",
        both_spellings,
        (FILE, f"{EXPERTS}down_proj", f"{EXPERTS}0.down_proj.weight", "stacked and one by one"),
    ),
    "a stray scale": (
        "bf16",
        put("lm_head.weight_scale", torch.clone, NORM),
        (f"{FILE}: lm_head.weight_scale: unknown tensor",),
    ),
    "an inverse scale": (
        "bf16",
        put(f"{LAYER}self_attn.q_proj.weight_scale_inv", torch.clone, NORM),
        ("q_proj.weight_scale_inv: unknown",),
    ),
    "untied head is missing": ("bf16", drop(HEAD), (f"{HEAD}: missing",)),
    "tied head has the wrong shape": (
        "bf16",
        all_of(text(tie_word_embeddings=True), put(HEAD, lambda t: t[:-1])),
        (HEAD, "[39, 32]"),
    ),
    "config asks for other sizes": ("bf16", text(hidden_size=64), (EMBED, "[40, 32]", "[40, 64]")),
    # Quark
    "an expert is missing": ("quark-mxfp4", drop(GATE, f"{GATE}_scale"), (f"{GATE}: missing",)),
    "an expert too many": (
        "quark-mxfp4",
        put(f"{EXPERTS}4.up_proj.weight", torch.clone, UP),
        (f"{FILE}: {EXPERTS}4.up_proj.weight: unknown",),
    ),
    "a scale is missing": ("quark-mxfp4", drop(f"{DOWN}_scale"), (f"{DOWN}_scale: missing", "quark MXFP4")),
    "a scale is renamed": (
        "quark-mxfp4",
        rename(f"{DOWN}_scale", f"{DOWN}_scale_inv"),
        (f"{DOWN}_scale: missing", f"{DOWN}_scale_inv: unknown"),
    ),
    "a scale is a float": (
        "quark-mxfp4",
        put(f"{DOWN}_scale", lambda t: t.float()),
        (f"{FILE}: {DOWN}_scale", "F32", "U8"),
    ),
    "a scale too many": (
        "quark-mxfp4",
        put(f"{DOWN}_scale_2", lambda t: t.float().sum(), f"{DOWN}_scale"),
        (f"{DOWN}",),
    ),
    "a scale has the wrong shape": (
        "quark-mxfp4",
        put(f"{GATE}_scale", lambda t: t[:, :1]),
        (f"{FILE}: {GATE}_scale", "[32, 1]", "[32, 2]"),
    ),
    "BF16 where U8 is due": ("quark-mxfp4", put(GATE, lambda t: t.bfloat16()), (f"{FILE}: {GATE}", "BF16", "U8")),
    "one expert is plain": (
        "quark-mxfp4",
        all_of(drop(f"{GATE}_scale"), put(GATE, lambda t: torch.zeros(32, 64).bfloat16())),
        (f"{FILE}: {GATE}", "plain", "quark MXFP4"),
    ),
    "codes of half the width": (
        "quark-mxfp4",
        put(GATE, lambda t: t[:, ::2]),
        (f"{FILE}: {GATE}", "[32, 16]", "[32, 32]"),
    ),
    "width 48": (
        "quark-mxfp4",
        text(moe_hidden_size=48),
        (FILE, f"{EXPERTS}0.gate_proj.weight", "blocks of 32", "has 48", "gate_up"),
    ),
    # NVFP4
    "the second scale is missing": (
        "nvfp4",
        drop(f"{EXPERTS}gate_up_proj_weight_scale_2"),
        (f"{EXPERTS}gate_up_proj_weight_scale_2: missing",),
    ),
    "the second scale is renamed": (
        "nvfp4",
        rename(f"{EXPERTS}down_proj_weight_scale_2", f"{EXPERTS}down_proj_weight_scale_inv"),
        ("down_proj_weight_scale_2: missing", "down_proj_weight_scale_inv: unknown"),
    ),
    "one factor for gate and up": (
        "nvfp4",
        put(f"{EXPERTS}gate_up_proj_weight_scale_2", lambda t: t[:, 0]),
        (f"{FILE}: {EXPERTS}gate_up_proj_weight_scale_2", "[4]", "[4, 2]"),
    ),
    "block scales as floats": (
        "nvfp4",
        put(f"{EXPERTS}down_proj_weight_scale", lambda t: t.float()),
        ("down_proj_weight_scale", "F32", "F8_E4M3"),
    ),
    "E8M0 beside NVFP4": (
        "nvfp4",
        put(f"{EXPERTS}down_proj_weight_scale", lambda t: t.view(torch.uint8)),
        ("down_proj_weight_scale", "U8", "F8_E4M3"),
    ),
    "input scale of the wrong shape": (
        "nvfp4",
        put(f"{EXPERTS}down_proj_input_scale", lambda t: t[:1]),
        ("down_proj_input_scale", "[1]", "[4]"),
    ),
    "width 24": ("nvfp4", text(moe_intermediate_size=24), (f"{EXPERTS}down_proj", "blocks of 16", "has 24")),
    # What the config says
    "unknown method": (
        "quark-mxfp4",
        config(lambda c: c["quantization_config"].update(quant_method="gptq")),
        ("quant_method is 'gptq'", "quark"),
    ),
    "no method": (
        "quark-mxfp4",
        config(lambda c: c["quantization_config"].pop("quant_method")),
        ("quant_method is None",),
    ),
    "config is no object": (
        "quark-mxfp4",
        config(lambda c: c.update(quantization_config="quark")),
        ("quantization_config is 'quark'",),
    ),
    "other group size": (
        "quark-mxfp4",
        config(lambda c: c["quantization_config"]["global_quant_config"]["weight"].update(group_size=16)),
        ("global_quant_config.weight.group_size is 16", "32"),
    ),
    "other scale format": (
        "quark-mxfp4",
        config(lambda c: c["quantization_config"]["global_quant_config"]["weight"].update(scale_format="e4m3")),
        ("scale_format is 'e4m3'", "e8m0"),
    ),
    "other layer scheme": (
        "quark-mxfp4",
        config(
            lambda c: c["quantization_config"]["layer_quant_config"].update({"*down*": {"weight": [{"dtype": "int4"}]}})
        ),
        ("layer_quant_config['*down*'].weight.dtype is 'int4'",),
    ),
    "other algorithm": (
        "nvfp4",
        config(lambda c: c["quantization"].update(quant_algo="FP8"), "hf_quant_config.json"),
        ("hf_quant_config.json", "quant_algo is 'FP8'"),
    ),
    "other group size for NVFP4": (
        "nvfp4",
        config(lambda c: c["quantization_config"].update(group_size=32)),
        ("group_size is 32", "16"),
    ),
    "broken hf_quant_config": (
        "nvfp4",
        raw(lambda b: b[:-5], "hf_quant_config.json"),
        ("hf_quant_config.json", "not JSON"),
    ),
    "hf_quant_config without its part": (
        "nvfp4",
        config(lambda c: c.clear(), "hf_quant_config.json"),
        ("hf_quant_config.json", "must be an object"),
    ),
    "compressed-tensors form": (
        "quark-mxfp4",
        config(
            lambda c: c.update(quantization_config={"quant_method": "compressed-tensors", "format": "pack-quantized"})
        ),
        ("format is 'pack-quantized'", "nvfp4-pack-quantized"),
    ),
    "config says another format": (
        "quark-mxfp4",
        config(lambda c: c.update(quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"})),
        ("says modelopt NVFP4", "quark MXFP4"),
    ),
    "groups say another width": (
        "nvfp4",
        config(lambda c: c["quantization_config"].update(config_groups={"group_0": {"weights": {"num_bits": 8}}})),
        ("config_groups['group_0'].weights.num_bits is 8", "4"),
    ),
}

# These need the tensors' values.
VALUES: dict[str, Case] = {
    "E8M0 NaN": (
        "quark-mxfp4",
        put(f"{GATE}_scale", lambda t: t.index_fill(1, torch.tensor(1), 255)),
        (f"{FILE}: {GATE}_scale", "255"),
    ),
    "E8M0 254 beside 2.0": (
        "quark-mxfp4",
        all_of(put(f"{UP}_scale", lambda t: t.fill_(254)), put(UP, lambda t: t.fill_(0x40))),
        (f"{FILE}: {UP}_scale", "overflows"),
    ),
    "E8M0 253 beside -4.0": (
        "quark-mxfp4",
        all_of(put(f"{DOWN}_scale", lambda t: t.fill_(253)), put(DOWN, lambda t: t.fill_(0x0E))),
        (f"{FILE}: {DOWN}_scale", "overflows"),
    ),
    "E4M3 NaN": (
        "nvfp4",
        put(f"{EXPERTS}down_proj_weight_scale", lambda t: t.view(torch.uint8).fill_(0xFF).view(t.dtype)),
        (f"{FILE}: {EXPERTS}down_proj_weight_scale", "NaN"),
    ),
    "infinite factor": (
        "nvfp4",
        put(f"{EXPERTS}gate_up_proj_weight_scale_2", lambda t: t.fill_(float("inf"))),
        ("gate_up_proj_weight_scale_2", "not finite"),
    ),
    "NaN factor": (
        "nvfp4",
        put(f"{EXPERTS}down_proj_weight_scale_2", lambda t: t.fill_(float("nan"))),
        ("down_proj_weight_scale_2", "not finite"),
    ),
}
