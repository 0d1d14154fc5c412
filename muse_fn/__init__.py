"""The model as equations: (params, state, tokens) in, (state, logits or tokens) out. Built with Muse Spark Open.

The public names of the house; everything else may move. Start with `load` and `forward`:

    import muse_fn
    model = muse_fn.load(path)
    logits = muse_fn.forward(model.params, tokens, model.config)
"""

from muse_fn.decoder import forward as forward
from muse_fn.generation import Settings as Settings
from muse_fn.generation import generate as generate
from muse_fn.generation import score as score
from muse_fn.kvcache.cache import KVCache as KVCache
from muse_fn.kvcache.cache import View as View
from muse_fn.kvcache.cache import init_cache as init_cache
from muse_fn.kvcache.cache import own_blocks as own_blocks
from muse_fn.load import Model as Model
from muse_fn.load import load as load
from muse_fn.load import save as save
from muse_fn.params.config import Config as Config
from muse_fn.params.init import init_params as init_params
from muse_fn.params.tree import Params as Params
from muse_fn.routing import expert_load as expert_load
from muse_fn.sample import Sampling as Sampling
from muse_fn.sharding.collectives import join as join
from muse_fn.sharding.collectives import leave as leave
from muse_fn.sharding.mesh import Mesh as Mesh
from muse_fn.sharding.simulated import simulate as simulate
from muse_fn.sharding.split import shard as shard
from muse_fn.sharding.split import unshard as unshard
from muse_fn.step import advance as advance
from muse_fn.step import decode as decode
from muse_fn.step import prefill as prefill

__all__ = [
    "Config",
    "KVCache",
    "Mesh",
    "Model",
    "Params",
    "Sampling",
    "Settings",
    "View",
    "advance",
    "decode",
    "expert_load",
    "forward",
    "generate",
    "init_cache",
    "init_params",
    "join",
    "leave",
    "load",
    "own_blocks",
    "prefill",
    "save",
    "score",
    "shard",
    "simulate",
    "unshard",
]
