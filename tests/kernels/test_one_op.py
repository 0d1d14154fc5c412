"""What counts as one operation: who watches is told of the whole, and of nothing inside."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from muse_fn.kernels import cpu, reference
from muse_fn.kernels.one_op import one_op, watcher, watching


class Diary:
    """Notes what it is told, and who watches at each moment."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def enter(self, name: str, args: tuple[Any, ...]) -> None:
        self.told.append((name, args))

    def leave(self, result: Any) -> None:
        self.told.append(("left", result))


@one_op
def inner(x: int) -> int:
    assert watcher() is None
    return x + 1


@one_op
def outer(x: int, y: int = 0) -> int:
    assert watcher() is None
    return inner(x) + y


@one_op
def broken() -> None:
    raise ZeroDivisionError


def test_the_outermost_is_told_and_no_other() -> None:
    diary = Diary()
    with watching(diary):
        assert outer(1, y=2) == 4
        assert watcher() is diary
    assert diary.told == [("outer", (1, 2)), ("left", 4)]
    assert watcher() is None
    assert outer(1) == 2, "without a watcher it is the function itself"


def test_an_error_leaves_the_watcher_in_place() -> None:
    diary = Diary()
    with watching(diary):
        with pytest.raises(ZeroDivisionError):
            broken()
        assert watcher() is diary


def test_each_thread_has_its_own_watcher() -> None:
    found: list[object] = []
    with watching(Diary()):
        thread = threading.Thread(target=lambda: found.append(watcher()))
        thread.start()
        thread.join()
    assert found == [None]


def test_the_cpu_form_of_expert_rows_is_one_although_it_calls_itself() -> None:
    diary = Diary()
    u, idx = torch.randn(5, 8), torch.tensor([[0, 3], [1, 9], [2, -1], [0, 1], [3, 2]])
    weights = torch.randn(4, 12, 8), torch.randn(4, 8, 6)
    with watching(diary):
        out = cpu.expert_rows(u, idx, *weights)
    assert [name for name, _ in diary.told] == ["expert_rows", "left"]
    assert isinstance(diary.told[1][1], Tensor)
    torch.testing.assert_close(out, reference.expert_rows(u, idx, *weights))
