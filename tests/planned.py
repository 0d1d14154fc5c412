"""Shared by the tests of the planner: a model that many meshes fit, and those meshes."""

from hypothesis import strategies as st

from muse_fn.devices import assumptions, rates
from muse_fn.floors import decode_step
from muse_fn.footprint import FORMATS
from muse_fn.params.config import Config
from muse_fn.plan import Prediction, Setup, predict
from muse_fn.sharding.mesh import Mesh
from tests.models import FULL, SLIDING

RELEASED = Config()
MODEL = Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    layers=5,
    heads=8,
    kv_heads=4,
    head_dim=4,
    latent_size=64,
    expert_size=256,
    experts=8,
    top_k=3,
    window=6,
    max_positions=512,
    layer_types=(SLIDING, FULL, SLIDING, SLIDING, FULL),
    mlp_layer_types=("sparse", "sparse", "dense", "sparse", "sparse"),
)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """Meshes that MODEL fits in every format."""
    sizes = [(ep, tp) for ep in (1, 2, 4, 8) for tp in (1, 2, 4, 8) if ep * tp <= 8]
    ep, tp = draw(st.sampled_from(sizes))
    return Mesh(ep, tp, draw(st.integers(1, 5)), draw(st.sampled_from(["replicated", "split"])))


FORMAT = st.sampled_from(list(FORMATS))
TIED = st.booleans()


def step_of(config: Config, mesh: Mesh, batch: int, context: int = 20) -> Prediction:
    """A decode step on Gaudi 2."""
    setup = Setup(config, mesh, context=context)
    return predict(setup, decode_step(batch, context), rates(assumptions("gaudi2", mesh.ranks)))
