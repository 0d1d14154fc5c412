"""How a launch of kernels/gpu_linear.py is divided into programs, by the sizes of matrices and the rows of inputs.

Cut best on an H200. What counts is how evenly multiprocessors read, and how much is on its way to each at once.
"""

from functools import lru_cache
from typing import NamedTuple

from muse_fn.kernels import gpu_direct

MOST_ROWS = 16
FLOAT_REGISTERS = 168  # of a thread: with what the compiler takes by itself it reads float32 matrices late

# One row of inputs, or up to FEW.
FEW = 4
OUT, STEP = 2, 2048  # rows of a matrix for each program, and inputs of each at once; more rows if there are fewer
WARPS = 4
# One row: up to WIDE inputs at once, so that all weights of a program are on their way before the inputs are there, of
# four rows of a matrix if these are no more than half as many; a warp for so many weights.
WIDE, EACH_WARP = 8192, 1024

# More of them.
FLOAT_OUTS, FLOAT_STEP = (4, 8), 1024  # the same for a float32 matrix: the second where two programs share its rows
TOKENS = 8  # rows of inputs for such a program
BLOCK = 16  # rows of a bfloat16 matrix in a product
DOT_OUTS = (4, 6, 8, 10, 12, 14, 16)  # of these, rows that one program may take
# Warps, and inputs that each takes at once: of a program among several on a multiprocessor, of one alone there, and
# beside float32 sums.
AMONG, BY_ITSELF, BESIDE_SUMS = (4, 128), (4, 256), (8, 64)
MOST_STAGES = 7  # such steps on their way to a program at once
HELD = (192 << 10, 96 << 10)  # most bytes of them: of a program, or of each where multiprocessors have several
ALONE = 1.8  # how much faster a multiprocessor reads while others do not than while all do


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


class Form(NamedTuple):
    """How a launch is divided: a runtime argument of the kernel, then its constants."""

    out: int  # rows of a bfloat16 matrix for each program, where it is multiplied on tensor cores
    OUT: int  # the same of any other
    TOKENS: int = 1  # rows of inputs for such a program
    STEP: int = 1
    ROWS: int = 1  # rows of inputs in a product on tensor cores
    BLOCK: int = 0  # rows of a matrix there; 0 if there are no such products
    DOT_STEP: int = 1
    WARPS: int = WARPS
    STAGES: int = 1  # one more than what is held at once
    FLOAT_STAGES: int = 0  # 0 where float32 matrices too are summed a few rows at once
    CHUNKS: int = 0  # of the form of small bfloat16 matrices; 0: another is taken

    def programs(self, w: tuple[int, bool], count: int) -> int:
        """Of a matrix: its rows, and whether it is float32."""
        rows, is_float = w
        return cdiv(rows, self.OUT) * cdiv(count, self.TOKENS) if is_float or self.out == 1 else cdiv(rows, self.out)


def few_rows(width: int, count: int) -> Form:
    """Of up to FEW rows of inputs: at least as many weights for a program whatever the width."""
    least = max(8, next_power(width))
    if count == 1:
        step = min(least, WIDE)
        out = 1 if step == WIDE else max(4, OUT * STEP // step)
        return Form(1, out, 1, step, WARPS=out * step // EACH_WARP)
    step = min(least, STEP)
    return Form(1, OUT * STEP // step, FEW, step)


@lru_cache
def more_rows(ws: tuple[tuple[int, bool], ...], width: int, count: int, x_size: int, processors: int) -> Form:
    """Of more rows: matrices by their rows and whether they are float32, `count` rows of inputs, whose elements are of
    x_size bytes for bfloat16 matrices, and of 4 at most for others.

    Programs read all inputs, so larger ones read less altogether, and smaller ones divide it more evenly. What counts
    is a multiprocessor's share of all that is read, or what the busiest one reads if that takes longer.
    """
    rows, few = 8 if count <= 8 else MOST_ROWS, few_rows(width, count)
    sums = count > FEW and any(is_float for _, is_float in ws)
    float_out = FLOAT_OUTS[count > TOKENS]
    float_step = min(max(8, next_power(width)), FLOAT_STEP)

    def form(out: int) -> Form:
        made = few._replace(out=out, ROWS=rows, BLOCK=BLOCK)
        if sums:
            made = made._replace(OUT=float_out, TOKENS=TOKENS, STEP=float_step)
        several = sum(made.programs(w, count) for w in ws) > processors
        held, (warps, step) = HELD[several], BESIDE_SUMS if sums else AMONG if several else BY_ITSELF
        dots = min(MOST_STAGES, held // (warps * step * (2 * BLOCK + rows * x_size)), cdiv(width, warps * step))
        floats = min(MOST_STAGES, held // (4 * float_step * (float_out + TOKENS)), cdiv(width, float_step))
        return made._replace(DOT_STEP=step, WARPS=warps, STAGES=1 + dots, FLOAT_STAGES=(1 + floats) * sums)

    def time(form: Form) -> float:
        counts = [form.programs(w, count) for w in ws]
        # Bytes that a program reads in each column.
        reads = [4 * (form.OUT + form.TOKENS) if is_float else 2 * form.out + count * x_size for _, is_float in ws]
        total = sum(n * read for n, read in zip(counts, reads, strict=True))
        busiest = max(cdiv(sum(counts), processors) * total / sum(counts), *reads)
        return max(total / processors, busiest / ALONE)

    return min(map(form, DOT_OUTS), key=time)


def form_of(
    ws: tuple[tuple[int, bool], ...], width: int, count: int, x_size: int, processors: int, is_direct: bool
) -> Form:
    """Of any number of rows; see `more_rows`. `is_direct`: gpu_direct can read the inputs, which are bfloat16, and the
    matrices, for all start at multiples of 16 bytes."""
    halves = [rows for rows, is_float in ws if not is_float]
    if count == 1 or (count <= FEW and not halves):
        return few_rows(width, count)
    chunks = gpu_direct.chunks(halves, width, count, processors) if is_direct else 0
    if chunks:
        return few_rows(width, count)._replace(out=gpu_direct.ROWS, WARPS=gpu_direct.WARPS, CHUNKS=chunks)
    return more_rows(ws, width, count, x_size, processors)


def most_registers(ws: tuple[tuple[int, bool], ...], form: Form) -> int | None:
    """What the compiler is told of registers for matrices by their rows and whether they are float32; None: nothing."""
    if form.CHUNKS:
        return gpu_direct.REGISTERS
    return FLOAT_REGISTERS if any(is_float for _, is_float in ws) else None
