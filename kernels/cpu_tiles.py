"""Tiles of attention for Numba: six queries beside 64 keys, products of pairs of bfloat16 with sums in registers.

Six rows times four vectors are 24 sums, which leaves registers for four vectors of the other factor and a pair of
this one in all lanes: 24 products for ten words that are read. Both products have one form, a row-major factor in
bfloat16 times one whose rows are packed in pairs: word n, c holds rows 2n and 2n + 1 of column c. Addresses are int64.
"""

# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from muse_fn.kernels.cpu_vectors import (
    _F32,
    _FLOATS,
    _I16,
    _I32,
    _I64,
    _WORDS,
    LANES,
    _dots,
    _external,
    _fma,
    _load,
    _loop,
    _plus,
    _prefetch,
    _splat,
    _store,
    _sums,
    _word,
)
from muse_fn.kernels.cpu_weights import LOWEST

ROWS, KEYS = 6, 64
VECTORS = KEYS // LANES
STATE = 64 * (2 + ROWS)  # bytes: the rows' tops and the factors by which sums come to them, a row's sum in 16 parts
_HALVES, _PLACES = ir.VectorType(_I16, LANES), ir.VectorType(_I64, LANES)
_LONG = ir.VectorType(_I16, 2 * LANES)
# 2^x for x from -1/2 to 1/2 within 2.2e-7, highest power first; 2^0 is 1, or sums would move where no top does.
POWERS = (1.3276472e-3, 9.6755419e-3, 5.5507131e-2, 2.4022120e-1, 6.9314694e-1, 1.0)


def _every(value):
    return ir.Constant(_FLOATS, [value] * LANES)


def _higher(b, x, best):
    """The greater of two, lane by lane; `best` where x is no number."""
    return b.select(b.fcmp_ordered(">", x, best), x, best)


def _exp2(b, x):
    """2^x lane by lane for x up to 1; 0 below -150, and what is no number stays none."""
    x = b.select(b.fcmp_ordered("<", x, _every(-160.0)), _every(-160.0), x)
    n = b.call(_external(b, "llvm.roundeven.v16f32", _FLOATS, _FLOATS), [x])
    rest, found = b.fsub(x, n), _every(POWERS[0])
    for power in POWERS[1:]:
        found = _fma(b, found, rest, _every(power))
    kinds, words = (_FLOATS, _FLOATS, _FLOATS, _I16, _I32), (ir.Constant(_I16, -1), ir.Constant(_I32, 4))
    form = _external(b, "llvm.x86.avx512.mask.scalef.ps.512", _FLOATS, *kinds)
    return b.call(form, [found, n, _every(0.0), *words])


def _narrow(b, x):
    """float32 -> bfloat16, to nearest, ties to even; subnormal numbers become 0."""
    return b.call(_external(b, "llvm.x86.avx512bf16.cvtneps2bf16.512", _HALVES, _FLOATS), [x])


def _lane(b, x, n):
    """One lane in all lanes."""
    return b.shuffle_vector(x, x, ir.Constant(_WORDS, [n] * LANES))


def _product(b, rows, stride, matrix, pairs, starts, count=ROWS, is_read=False):
    """The sums `starts`, vector after vector of each of `count` rows, plus `pairs` pairs of each row times the packed
    factor, of which so many vectors make a row. If the rows lie one behind the other and are to be `read` from far,
    as many behind them are asked for meanwhile."""
    width = len(starts) // count
    at = [_plus(b, rows, b.mul(stride, _word(r))) for r in range(count)]

    def body(n, sums):
        from_here, made = _plus(b, matrix, b.mul(n, _word(64 * width))), []
        if is_read:
            _prefetch(b, _plus(b, at[0], b.mul(_plus(b, pairs, n), _word(4 * count))), again=2)
        columns = [_load(b, _plus(b, from_here, 64 * v), _WORDS) for v in range(width)]
        for r in range(count):
            pair = _splat(b, _load(b, _plus(b, at[r], b.mul(n, _word(4))), _I32))
            made += [_dots(b, pair, column, sums[r * width + v]) for v, column in enumerate(columns)]
        return made

    return _loop(b, pairs, starts, body)


def _hidden(b, scores, places, bounds):
    """-infinity in place of the scores of keys that a row does not see: of [2, ROWS] bounds, int64, a key's place is
    above the second and no higher than the first."""
    keys = [_load(b, _plus(b, places, 128 * v), _PLACES) for v in range(VECTORS)]
    found = []
    for r in range(ROWS):
        last, below = (_splat(b, _load(b, _plus(b, bounds, 8 * (ROWS * n + r)), _I64)) for n in (0, 1))
        for v, key in enumerate(keys):
            seen = b.and_(b.icmp_signed("<=", key, last), b.icmp_signed(">", key, below))
            found.append(b.select(seen, scores[r * VECTORS + v], _every(float("-inf"))))
    return found


def weights(is_masked):
    """An intrinsic (q, stride, k, pairs, factor, state, weights, places, bounds): the scores of KEYS keys for ROWS rows
    become weights 2^((score - top) * factor), bfloat16 [ROWS, KEYS]. The rows' state is brought to the new tops and
    grows by these weights. If `is_masked` not all keys are seen from all rows (`_hidden`)."""

    def codegen(context, b, signature, args):
        q, stride, k, pairs, factor, state, out, places, bounds = args
        scores = _product(b, q, stride, k, pairs, [_every(0.0)] * (ROWS * VECTORS))
        if is_masked:
            scores = _hidden(b, scores, places, bounds)
        factor, before, highest = _splat(b, factor), _load(b, state, _FLOATS), []
        for r in range(ROWS):
            highest.append(_every(float("-inf")))
            for v in range(VECTORS):
                highest[r] = _higher(b, scores[r * VECTORS + v], highest[r])
        found = _sums(b, highest, lambda x, y: _higher(b, x, y))
        tops = _higher(b, found, before)
        less = _exp2(b, b.fmul(b.fsub(before, tops), factor))
        _store(b, tops, state)
        _store(b, less, _plus(b, state, 64))
        for r in range(ROWS):
            top, at = _lane(b, tops, r), _plus(b, state, 64 * (2 + r))
            total = b.fmul(_load(b, at, _FLOATS), _lane(b, less, r))
            for v in range(VECTORS):
                # The difference first: that of the highest score is 0, whatever its size.
                weight = _exp2(b, b.fmul(b.fsub(scores[r * VECTORS + v], top), factor))
                total = b.fadd(total, weight)
                _store(b, _narrow(b, weight), _plus(b, out, 2 * (r * KEYS + v * LANES)))
            _store(b, total, at)
        return context.get_dummy_value()

    def typed(context, q, stride, k, pairs, factor, state, out, places, bounds):
        return types.void(*[types.int64] * 4, types.float32, *[types.int64] * 4), codegen

    return intrinsic(typed)


def weighed(vectors):
    """An intrinsic (weights, v, pairs, state, sums, stride): `vectors` times 16 columns of ROWS rows of sums, float32,
    are brought to the state's tops and grow by the rows' weights times `pairs` pairs of values."""

    def codegen(context, b, signature, args):
        p, v, pairs, state, sums, stride = args
        places = [_plus(b, sums, b.mul(stride, _word(r)), 64 * n) for r in range(ROWS) for n in range(vectors)]
        less = [_splat(b, _load(b, _plus(b, state, 64 + 4 * r), _F32)) for r in range(ROWS)]
        starts = [b.fmul(_load(b, at, _FLOATS), less[n // vectors]) for n, at in enumerate(places)]
        for made, at in zip(_product(b, p, _word(2 * KEYS), v, pairs, starts), places, strict=True):
            _store(b, made, at)
        return context.get_dummy_value()

    def typed(context, p, v, pairs, state, sums, stride):
        return types.void(*[types.int64] * 6), codegen

    return intrinsic(typed)


@intrinsic
def begun(context, state):
    """No key has been seen."""

    def codegen(context, b, signature, args):
        _store(b, _every(LOWEST), args[0])
        for n in range(1, STATE // 64):
            _store(b, _every(0.0), _plus(b, args[0], 64 * n))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def shares(context, state):
    """Writes 1 / a row's sum of weights where the factors were, 0 where that is 0."""

    def codegen(context, b, signature, args):
        rows = [_load(b, _plus(b, args[0], 64 * (2 + r)), _FLOATS) for r in range(ROWS)]
        totals = _sums(b, rows)
        none = b.fcmp_ordered("==", totals, _every(0.0))
        _store(b, b.select(none, _every(0.0), b.fdiv(_every(1.0), totals)), _plus(b, args[0], 64))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def divided(context, sums, share, count, out):
    """`count` times 16 sums times the float32 at `share`, as bfloat16."""

    def codegen(context, b, signature, args):
        sums, share, count, out = args
        factor = _splat(b, _load(b, share, _F32))

        def body(n, _):
            made = b.fmul(_load(b, _plus(b, sums, b.mul(n, _word(64))), _FLOATS), factor)
            _store(b, _narrow(b, made), _plus(b, out, b.mul(n, _word(32))))
            return []

        _loop(b, count, [], body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@intrinsic
def turned(context, source, stride, target, target_stride):
    """16 words of each of 16 rows -> 16 words of each of 16 columns; strides in bytes."""

    def codegen(context, b, signature, args):
        source, stride, target, target_stride = args
        rows = [_load(b, _plus(b, source, b.mul(stride, _word(n))), _WORDS) for n in range(LANES)]
        for step in (8, 4, 2, 1):  # blocks of so many words change places across the diagonal
            near = ir.Constant(_WORDS, [LANES + n - step if n & step else n for n in range(LANES)])
            far = ir.Constant(_WORDS, [LANES + n if n & step else n + step for n in range(LANES)])
            for n in (n for n in range(LANES) if not n & step):
                pair = rows[n], rows[n + step]
                rows[n], rows[n + step] = b.shuffle_vector(*pair, near), b.shuffle_vector(*pair, far)
        for n, row in enumerate(rows):
            _store(b, row, _plus(b, target, b.mul(target_stride, _word(n))))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@intrinsic
def paired(context, first, second, target):
    """32 bfloat16 of each of two rows -> 32 words, the first row's the low halves."""

    def codegen(context, b, signature, args):
        both = [_load(b, at, _LONG) for at in args[:2]]
        for half in (0, 1):
            places = [16 * half + n // 2 + 32 * (n % 2) for n in range(32)]
            mask = ir.Constant(ir.VectorType(_I32, 2 * LANES), places)
            _store(b, b.shuffle_vector(*both, mask), _plus(b, args[2], 64 * half))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def clear(context, target):
    """64 bytes of zeros."""

    def codegen(context, b, signature, args):
        _store(b, ir.Constant(_WORDS, [0] * LANES), args[0])
        return context.get_dummy_value()

    return types.void(types.int64), codegen
