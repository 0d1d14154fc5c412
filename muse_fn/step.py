"""Steps over a cache: a chunk of a prompt, and one or a few new tokens for each running sequence."""

import torch
from torch import Tensor

from muse_fn.decoder import hidden_states, logits
from muse_fn.kernels.select import select
from muse_fn.kvcache.cache import KVCache, View, locate, step_positions
from muse_fn.params.config import Config
from muse_fn.params.tree import Params
from muse_fn.sharding.mesh import Mesh, one_rank


def prefill(
    params: Params,
    tokens: Tensor,
    kv: KVCache,
    view: View,
    config: Config,
    mesh: Mesh | None = None,
    *,
    all_logits: bool = False,
) -> tuple[Tensor, KVCache]:
    """Reads a chunk of each prompt into the cache. Consumes `kv`.

    tokens int64 [B, T]; row b has view.count_B[b] >= 1 real tokens, then padding, and follows view.past_B[b] positions
    already in the cache. Returns float32 logits of each row's last real token [B, V], or with `all_logits` of every
    column [B, T, V] (padding columns are meaningless), and the cache.
    """
    h, kv = _run(params, tokens, kv, view, config, mesh)
    if not all_logits:
        last = (view.count_B - 1).view(-1, 1, 1).expand(-1, 1, h.shape[-1])
        h = h.gather(1, last).squeeze(1)
    return logits(params, h, config, select(params.embed.device)), kv


def decode(
    params: Params, tokens: Tensor, kv: KVCache, view: View, config: Config, mesh: Mesh | None = None
) -> tuple[Tensor, KVCache]:
    """One step of running sequences, each with T >= 1 new tokens: int64 [B, T] -> float32 [B, T, V]. Consumes `kv`."""
    h, kv = _run(params, tokens, kv, view, config, mesh)
    return logits(params, h, config, select(params.embed.device)), kv


def _run(
    params: Params, tokens: Tensor, kv: KVCache, view: View, config: Config, mesh: Mesh | None
) -> tuple[Tensor, KVCache]:
    one_rank(mesh)
    pos_BT = step_positions(view, tokens.shape[1])
    places = locate(view, tokens.shape[1], kv.k[0].shape[1])
    h, out = hidden_states(params, tokens, kv, places, pos_BT, config, select(params.embed.device))
    assert isinstance(out, KVCache)
    return h, out


def advance(view: View, count: int | Tensor = 1) -> View:
    """The view of the next step: this step's positions become the past, `count` new ones follow."""
    past = view.past_B + view.count_B
    return View(view.table_BN, past, torch.as_tensor(count, device=past.device).expand_as(past))
