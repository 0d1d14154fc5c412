"""The architecture of one model, read from a published `config.json` and refused here if it cannot be run.

Letters used as shape suffixes everywhere in the house:

    B batch   T query tokens   S key tokens   H hidden   V vocabulary   N heads   K kv_heads   D head_dim
    E experts R routes per token (top_k)      M latent (width of the experts' input)   F inner width of an expert
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeGuard, cast

from muse_fn.params.safetensors_header import read_object

LayerType = Literal["sliding_attention", "full_attention"]
MlpType = Literal["sparse", "dense"]


class ConfigError(ValueError):
    """A config.json that cannot be run. The message lists every problem: field, value found, values allowed."""


@dataclass(frozen=True)
class Config:
    """Sizes and constants of the text decoder. Defaults are the released 816B model's (reference: config.json).

    `layer_types`, `layer_rope_theta` and `mlp_layer_types` have one entry per layer; when empty they are derived:
    every fourth layer counted back from the last one attends to everything and has no rotary, all layers are sparse.
    Frozen and hashable; free of devices, meshes and paths.
    """

    vocab_size: int = 202_048  # V
    hidden_size: int = 8192  # H
    intermediate_size: int = 16_384  # inner width of dense layers
    layers: int = 62
    heads: int = 128  # N
    kv_heads: int = 16  # K
    head_dim: int = 64  # D
    latent_size: int = 4096  # M
    expert_size: int = 4096  # F
    experts: int = 256  # E
    top_k: int = 8  # R
    window: int = 2048  # keys a sliding layer sees, the query's own included: i - j < window
    max_positions: int = 1_048_576
    rope_theta: float = 500_000.0
    rms_norm_eps: float = 1e-5
    post_norm_eps: float = 1e-8
    qk_scale_factor: float = 5.4730064863875
    output_multiplier: float = 0.1767766952966369  # on router logits and on vocabulary logits
    soft_cap: float = 20.0
    routed_scaling_factor: float = 1.0
    residual_gate_temperature: float = 0.3
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    layer_types: tuple[LayerType, ...] = ()
    layer_rope_theta: tuple[float, ...] = ()  # 0: no rotary in this layer; else rotary with the one rope_theta
    mlp_layer_types: tuple[MlpType, ...] = ()
    bos_token_id: int | None = 200_000
    eos_token_id: tuple[int, ...] = (200_001,)
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        from_end = [self.layers - 1 - i for i in range(self.layers if problem_of_size(self, "layers") == "" else 0)]
        derived = {
            "layer_types": tuple("sliding_attention" if n % 4 else "full_attention" for n in from_end),
            "layer_rope_theta": tuple(self.rope_theta if n % 4 else 0.0 for n in from_end),
            "mlp_layer_types": ("sparse",) * len(from_end),
        }
        for field, value in derived.items():
            if not getattr(self, field):
                object.__setattr__(self, field, value)
        problems = problems_of(self)
        if problems:
            raise ConfigError("config cannot be run:\n  " + "\n  ".join(problems))

    @staticmethod
    def from_json(source: "str | Path | dict[str, Any]") -> "Config":
        """Reads a published config: a `config.json`, the folder holding it, or its parsed dictionary.

        Both the whole file (with `text_config`) and a text part alone are accepted; absent fields take the released
        defaults, as transformers leaves out fields equal to them. Raises ConfigError naming every bad field.
        """
        whole = read_json(source)
        try:
            return config_of_json(whole)
        except ConfigError as error:
            raise error if isinstance(source, dict) else ConfigError(f"{source}: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """The text part of a published `config.json`."""
        text: dict[str, Any] = {key: getattr(self, field) for field, key in JSON_NAMES.items()}
        text.update({key: list(text[key]) for key in ("layer_types", "layer_rope_theta", "mlp_layer_types")})
        eos = list(self.eos_token_id)
        text["eos_token_id"] = eos[0] if len(eos) == 1 else eos or None
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": self.rope_theta}
        return {"model_type": "muse_spark_text", **text, **FIXED}

    def is_sliding(self, layer: int) -> bool:
        """Whether this layer sees only the last `window` keys."""
        return self.layer_types[layer] == "sliding_attention"

    def is_sparse(self, layer: int) -> bool:
        """Whether this layer's MLP is a mixture of experts."""
        return self.mlp_layer_types[layer] == "sparse"

    def has_rotary(self, layer: int) -> bool:
        """Whether queries and keys of this layer are rotated by position."""
        return self.layer_rope_theta[layer] != 0


# Config field -> key of the published text config.
JSON_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "latent_size": "moe_hidden_size",
    "expert_size": "moe_intermediate_size",
    "experts": "num_local_experts",
    "top_k": "num_experts_per_tok",
    "window": "sliding_window",
    "max_positions": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
    "post_norm_eps": "post_norm_eps",
    "qk_scale_factor": "qk_scale_factor",
    "output_multiplier": "output_multiplier",
    "soft_cap": "final_logit_softcapping",
    "routed_scaling_factor": "routed_scaling_factor",
    "residual_gate_temperature": "residual_gate_temperature",
    "initializer_range": "initializer_range",
    "tie_word_embeddings": "tie_word_embeddings",
    "layer_types": "layer_types",
    "layer_rope_theta": "layer_rope_theta",
    "mlp_layer_types": "mlp_layer_types",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "pad_token_id",
}

# Keys that change the equations and that only one value of which is implemented by anyone.
FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "num_shared_experts": 0,
}


def is_size(value: object) -> TypeGuard[int]:
    """A positive whole number (a bool is none)."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


MAX_NUMBER = 1e300  # a longer whole number has no float


def is_number(value: object) -> TypeGuard[float]:
    """A finite number (a bool is none)."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


# Far beyond any model, and small enough that a hostile file cannot make lists of layers or experts fill the memory.
LIMITS = {"layers": 1024, "experts": 4096}


def problem_of_size(config: Config, name: str) -> str:
    """Why this field is no size; empty if it is one."""
    value, limit = getattr(config, name), LIMITS.get(name, 2**31 - 1)
    return "" if is_size(value) and value <= limit else f"{name} is {value!r}: must be a whole number from 1 to {limit}"


def problems_of(config: Config) -> list[str]:
    """Every reason why this config cannot be run, as sentences."""
    typed = [(f.name, f.type, getattr(config, f.name)) for f in fields(config)]
    problems = [problem for n, t, _ in typed if t is int and (problem := problem_of_size(config, n))]
    problems += [f"{n} is {v!r}: must be a finite number" for n, t, v in typed if t is float and not is_number(v)]
    flags = [(n, v) for n, t, v in typed if t is bool and not isinstance(v, bool)]
    problems += [f"{n} is {v!r}: must be true or false" for n, v in flags]
    if problems:
        return problems
    return [*_problems_of_sizes(config), *_problems_of_layers(config)]


def _problems_of_sizes(config: Config) -> list[str]:
    rules = {
        f"heads is {config.heads}: must be a multiple of kv_heads {config.kv_heads}": config.heads % config.kv_heads,
        f"top_k is {config.top_k}: must be at most experts {config.experts}": config.top_k > config.experts,
        f"head_dim is {config.head_dim}: must be even for rotary": config.head_dim % 2 and any(config.layer_rope_theta),
    }
    positive = ("rope_theta", "rms_norm_eps", "post_norm_eps", "residual_gate_temperature")
    signs = [f"{n} is {getattr(config, n)}: must be above 0" for n in positive if not getattr(config, n) > 0]
    if config.soft_cap < 0:
        signs.append(f"soft_cap is {config.soft_cap}: must be above 0, or 0 for none")
    ids: list[object] = [i for i in (*config.eos_token_id, config.bos_token_id, config.pad_token_id) if i is not None]
    bad_ids = [i for i in ids if isinstance(i, bool) or not isinstance(i, int)]
    return (
        [rule for rule, broken in rules.items() if broken] + signs + [f"token id {i!r}: not a number" for i in bad_ids]
    )


def _problems_of_layers(config: Config) -> list[str]:
    problems: list[str] = []
    allowed: dict[str, tuple[str, ...] | None] = {
        "layer_types": ("sliding_attention", "full_attention"),
        "mlp_layer_types": ("sparse", "dense"),
        "layer_rope_theta": None,
    }
    for name, values in allowed.items():
        found = getattr(config, name)
        if len(found) != config.layers:
            problems.append(f"{name} has {len(found)} entries: the model has {config.layers} layers")
        for i, value in enumerate(found):
            if values is None and not (is_number(value) and value >= 0):
                problems.append(f"{name}[{i}] is {value!r}: must be a number, 0 for no rotary")
            if values is not None and value not in values:
                problems.append(f"{name}[{i}] is {value!r}: must be one of {', '.join(values)}")
    return problems


def read_json(source: "str | Path | dict[str, Any]") -> dict[str, Any]:
    """The parsed config of a dictionary, a file, or the folder that holds `config.json`."""
    if isinstance(source, dict):
        return source
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        return read_object(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def config_of_json(whole: dict[str, Any]) -> Config:
    """The config of a parsed `config.json`; see Config.from_json."""
    text: Any = whole.get("text_config", whole)
    if not isinstance(text, dict):
        raise ConfigError(f"text_config is {text!r}: must be an object")
    text = cast("dict[str, Any]", text)
    problems = [
        f"model_type is {part.get('model_type')!r}: must be {want!r}"
        for part, want in (
            (whole, "muse_spark" if "text_config" in whole else "muse_spark_text"),
            (text, "muse_spark_text"),
        )
        if part.get("model_type", want) != want
    ]
    problems += [
        f"{key} is {text[key]!r}: only {value!r} is implemented"
        for key, value in FIXED.items()
        if text.get(key) is not None and text[key] != value
    ]
    rope: Any = text.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        problems.append(f"rope_parameters is {rope!r}: must be an object")
        rope = {}
    rope = cast("dict[str, Any]", rope)
    if text.get("rope_scaling"):
        problems.append(f"rope_scaling is {text['rope_scaling']!r}: only null is implemented")
    if rope.get("rope_type", "default") != "default":
        problems.append(f"rope_parameters.rope_type is {rope['rope_type']!r}: only 'default' is implemented")
    if problems:
        raise ConfigError("config cannot be run:\n  " + "\n  ".join(dict.fromkeys(problems)))
    return Config(**_values(text, rope))


def _values(text: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Constructor arguments for the keys present; null means the default, except for token ids, where it means none."""
    nullable = ("bos_token_id", "pad_token_id", "eos_token_id")
    values = {f: text[k] for f, k in JSON_NAMES.items() if k in text and (text[k] is not None or f in nullable)}
    for field in ("layer_types", "layer_rope_theta", "mlp_layer_types"):
        if field in values:
            values[field] = tuple(values[field]) if isinstance(values[field], list) else (values[field],)
    if "eos_token_id" in values:
        eos = values["eos_token_id"]
        values["eos_token_id"] = (
            () if eos is None else tuple(cast("list[Any]", eos)) if isinstance(eos, list) else (eos,)
        )
    if "rope_theta" in rope or "rope_theta" in text:
        values["rope_theta"] = rope.get("rope_theta", text.get("rope_theta"))
    return values
