"""Plans: several forms in one call, with what is not known before put where it belongs."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba", reason="Numba is not installed")

from muse_fn.kernels import cpu_rows
from muse_fn.kernels.cpu_calls import Work
from muse_fn.kernels.cpu_plan import MOST_WORDS, follow, planned, unknown
from muse_fn.kernels.norms import Gain, plain_norm

EPS = 1e-5


def norm(x: int, out: int, count: int) -> Work:
    return cpu_rows.norm_of(x, True, count, 64, 0, EPS, out, True, out)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_each_number_is_put_where_it_belongs_with_its_offset() -> None:
    given, factor, middle, out = unknown(1), draw(1, 64), unknown(2), unknown(3)
    second = cpu_rows.norm_of(middle, True, 2, 64, factor.data_ptr(), EPS, out + 256, True, middle)
    plan = planned([norm(given + 64 * 4, middle, 2), second])
    for seed in (2, 3):
        x, room, found = draw(seed, 3, 64), torch.empty(2, 64), torch.zeros(4, 64)
        follow([plan], [[y.data_ptr() for y in (x, room, found)]])
        expected = cpu_rows.normed(cpu_rows.normed(x[1:], None, EPS, x.dtype), Gain(factor), EPS, x.dtype)
        assert torch.equal(found[1:3], expected)
        assert not found[[0, 3]].any()


def test_a_plan_may_run_on_several_threads_at_once() -> None:
    plan = planned([norm(unknown(1), unknown(2), 1), norm(unknown(2), unknown(3), 1)])

    def run(seed: int) -> bool:
        x, room, out = draw(seed, 1, 64), torch.empty(1, 64), torch.empty(1, 64)
        follow([plan], [[y.data_ptr() for y in (x, room, out)]])
        return bool(torch.allclose(out, plain_norm(x, EPS), rtol=1e-4, atol=1e-5))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(200)))


def test_plans_run_one_after_the_other_each_with_its_own_numbers() -> None:
    first, second = planned([norm(unknown(1), unknown(2), 3)]), planned([norm(unknown(1), unknown(2), 2)])
    x, middle, out = draw(2, 3, 64), torch.empty(3, 64), torch.zeros(3, 64)
    follow([first, second], [[x.data_ptr(), middle.data_ptr()], [middle.data_ptr() + 256, out.data_ptr()]])
    expected = cpu_rows.normed(cpu_rows.normed(x, None, EPS, x.dtype)[1:], None, EPS, x.dtype)
    assert torch.equal(out[:2], expected)
    assert not out[2].any()


def test_more_arguments_than_there_is_room_for_are_refused() -> None:
    works = [norm(unknown(1), unknown(2), 1)] * (MOST_WORDS // 12)
    with pytest.raises(ValueError, match=f"at most {MOST_WORDS}"):
        planned(works)
