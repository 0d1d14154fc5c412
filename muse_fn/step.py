"""Steps over a cache: a chunk of a prompt, and one or a few new tokens for each running sequence."""

import torch
from torch import Tensor

from muse_fn.decoder import check_tokens, hidden_states, logits
from muse_fn.kernels.select import select
from muse_fn.kvcache.cache import KVCache, View, blocks_for, locate, step_positions
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

    tokens int64 [B, T]; row b has view.count_B[b] real tokens (at least 1 unless `all_logits`), then padding, and
    follows view.past_B[b] positions already in the cache. Returns float32 logits of each row's last real token [B, V],
    or with `all_logits` of every column [B, T, V] (padding columns are meaningless), and the cache. Raises ValueError
    for a step that does not fit its blocks.
    """
    check_step(tokens, kv, view, config, at_least=0 if all_logits else 1)
    h, kv = _run(params, tokens, kv, view, config, mesh)
    if not all_logits:
        last = (view.count_B - 1).view(-1, 1, 1).expand(-1, 1, h.shape[-1])
        h = h.gather(1, last).squeeze(1)
    return logits(params, h, config, select(params.embed.device)), kv


def decode(
    params: Params, tokens: Tensor, kv: KVCache, view: View, config: Config, mesh: Mesh | None = None
) -> tuple[Tensor, KVCache]:
    """One step of running sequences, each with T >= 1 new tokens: int64 [B, T] -> float32 [B, T, V]. Consumes `kv`."""
    check_step(tokens, kv, view, config, at_least=0)
    h, kv = _run(params, tokens, kv, view, config, mesh)
    return logits(params, h, config, select(params.embed.device)), kv


def check_step(tokens: Tensor, kv: KVCache, view: View, config: Config, at_least: int) -> None:
    """Raises ValueError, naming field and row, for a step that would write outside of its blocks or past the limit.

    Reads the view on the host: a captured step is checked before it is captured and leaves this out.
    """
    check_tokens(tokens)
    (batch, length), (blocks, size) = tokens.shape, kv.k[0].shape[:2]
    shapes = {"table_BN": (batch, view.table_BN.shape[-1]), "past_B": (batch,), "count_B": (batch,)}
    for name, shape in shapes.items():
        found = tuple(getattr(view, name).shape)
        if found != shape:
            raise ValueError(f"view.{name} is {list(found)}: tokens are {[batch, length]}, so it must be {list(shape)}")
    room = min(view.table_BN.shape[1] * size, config.max_positions)
    for row, (table, past, count) in enumerate(zip(*(part.tolist() for part in view), strict=True)):
        if not at_least <= count <= length:
            raise ValueError(f"view.count_B[{row}] is {count}: must be {at_least} to {length}, the width of tokens")
        if past < 0 or past + count > room:
            held = f"its table holds {len(table) * size}, the model {config.max_positions}"
            raise ValueError(f"row {row} would reach position {past + count}: {held}")
        used = table[: blocks_for(past + count, size)]
        if any(not 0 < block < blocks for block in used):
            raise ValueError(f"view.table_BN[{row}] is {used}: the cache has blocks 1 to {blocks - 1} to give")


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
