"""Strictness for the whole suite. Warnings are errors by pyproject.toml."""

import logging
import os
from collections.abc import Iterator

os.environ.setdefault("TRITON_INTERPRET", "1")  # device kernels run here in Triton's interpreter; before its import

import pytest
import torch
from hypothesis import HealthCheck, settings

# Examples are few, each is a small model; a deadline would only measure what else the machine is doing.
# For a long search: pytest --hypothesis-profile=long
settings.register_profile(
    "house",
    deadline=None,
    max_examples=20,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("long", settings.get_profile("house"), max_examples=500, derandomize=False)
settings.load_profile("house")

torch.set_num_threads(1)  # one order of summation, and tiny tensors gain nothing from more


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Every test starts from the same random state."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """A server that a test configured leaves no log behind that writes where the test's output was caught."""
    logger = logging.getLogger("muse_fn.serve")
    before, level, propagate = [*logger.handlers], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = before, propagate
    logger.setLevel(level)
