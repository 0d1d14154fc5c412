"""The published model as transformers runs it, built small and saved in the published layout.

transformers is the oracle and a test dependency only. Attention and experts are its "eager" forms: its other forms sum
in other orders, and the router and the residual gates amplify that beyond any useful tolerance.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import MuseSparkConfig, MuseSparkForConditionalGeneration
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()

EAGER: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}

TEXT: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 5,
    "moe_hidden_size": 24,
    "moe_intermediate_size": 20,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
}
VISION = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "patch_size": 2}
AUDIO = {"patch_sizes": [2], "hidden_sizes": [8], "depths": [1], "num_hidden_layers": 1}


def build(
    seed: int, *, std: float = 0.3, gates: tuple[float, float] = (-0.9, -0.5), **text: Any
) -> MuseSparkForConditionalGeneration:
    """A float32 model with every parameter drawn: matrices N(0, std), norm weights N(0, 0.2) from their neutral value,
    selection biases N(0, 0.1), residual gates uniform in `gates` (by default a branch is 5 to 20 % of the stream)."""
    text = {**TEXT, **text}
    config = MuseSparkConfig(
        text_config=text,
        vision_config=dict(VISION),
        audio_config={**AUDIO, "out_hidden_size": text["hidden_size"]},
        out_hidden_size=16,
        projector_hidden_size=16,
    )
    model = MuseSparkForConditionalGeneration(config).eval()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "residual_gate" in name:
                tensor.uniform_(*gates, generator=draw)
            elif "correction_bias" in name:
                tensor.normal_(0, 0.1, generator=draw)
            elif "norm" in name:
                tensor.add_(torch.randn(tensor.shape, generator=draw) * 0.2)
            elif tensor.dim() > 1:
                tensor.normal_(0, std, generator=draw)
    return model


def save(model: MuseSparkForConditionalGeneration, path: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Writes the model with transformers' own `save_pretrained`; float32 parameters of the layout stay float32."""
    if dtype != torch.float32:
        save(model, path / "float32")
        model = reopen(path / "float32", dtype)
        path = path / str(dtype).removeprefix("torch.")
    model.save_pretrained(path)
    return path


def reopen(path: Path, dtype: torch.dtype = torch.float32) -> MuseSparkForConditionalGeneration:
    """The saved model as transformers loads it."""
    return MuseSparkForConditionalGeneration.from_pretrained(path, dtype=dtype, **EAGER).eval()


def logits(model: MuseSparkForConditionalGeneration, tokens: Tensor, **more: Any) -> Tensor:
    """float32 [B, T, V]."""
    with torch.no_grad():
        return model(input_ids=tokens, **more).logits.float()


def generate(model: MuseSparkForConditionalGeneration, prompt: Tensor, count: int) -> Tensor:
    """The greedy continuation over transformers' own cache: int64 [1, T] -> [1, T + count]."""
    # Its sliding cache keeps the last `window - 1` keys as [-(window - 1):], which for a window of 1 is all of them.
    loose: Any = model
    cached = loose.config.text_config.sliding_window > 1
    return loose.generate(
        prompt, max_new_tokens=count, do_sample=False, use_cache=cached, attention_mask=torch.ones_like(prompt)
    )
