"""Products of a matrix's rows with many rows of x for Numba: eight of the one beside up to 48 of the other.

The matrix is read as it lies. Rows of x stand as columns: 16 to a vector, up to three vectors to a panel, whose word
n, c holds channels 2n and 2n + 1 of row c. What eight rows make of a panel is eight channels of its columns, so two
of them are a word of the next product's panel.
"""

# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from numba import types
from numba.extending import intrinsic

from muse_fn.kernels.cpu_tiles import _every, _exp2, _narrow, _product
from muse_fn.kernels.cpu_vectors import (
    _FLOATS,
    _WORDS,
    HAS_PERMUTE,
    _load,
    _pair_of_mxfp4,
    _plus,
    _store,
    _word,
    _words,
)

EIGHT, WIDEST = 8, 3


def sums_of(vectors):
    """An intrinsic (w, stride, x, pairs, out): EIGHT rows times a panel of so many vectors, float32, 16 * WIDEST to a
    row of `out`."""

    def codegen(context, b, signature, args):
        w, stride, x, pairs, out = args
        made = _product(b, w, stride, x, pairs, [_every(0.0)] * (EIGHT * vectors), EIGHT, True)
        for n, value in enumerate(made):
            _store(b, value, _plus(b, out, 64 * (n // vectors * WIDEST + n % vectors)))
        return context.get_dummy_value()

    def typed(context, w, stride, x, pairs, out):
        return types.void(*[types.int64] * 5), codegen

    return intrinsic(typed)


def hidden(vectors):
    """An intrinsic (gate, up, stride, x, pairs, out): silu(gate x) * up x for EIGHT rows of each, rounded once, as four
    rows of words of a panel of as many vectors."""

    def codegen(context, b, signature, args):
        gate, up, stride, x, pairs, out = args
        none, made = [_every(0.0)] * (EIGHT * vectors), []
        gates = _product(b, gate, stride, x, pairs, none, EIGHT, True)
        for value, other in zip(gates, _product(b, up, stride, x, pairs, none, EIGHT, True), strict=True):
            power = _exp2(b, b.fmul(value, _every(-1.44269504)))
            both = b.fmul(b.fdiv(value, b.fadd(power, _every(1.0))), other)
            made.append(b.zext(_narrow(b, both), _WORDS))
        for n in range(EIGHT // 2 * vectors):
            low = n // vectors * 2 * vectors + n % vectors
            word = b.or_(made[low], b.shl(made[low + vectors], _words(16)))
            _store(b, word, _plus(b, out, 64 * n))
        return context.get_dummy_value()

    def typed(context, gate, up, stride, x, pairs, out):
        return types.void(*[types.int64] * 6), codegen

    return intrinsic(typed)


@intrinsic
def sixteen(context, source, is_float, target):
    """16 float32, as they are or as bfloat16."""

    def codegen(context, b, signature, args):
        source, is_float, target = args
        value = _load(b, source, _FLOATS)
        with b.if_else(b.icmp_signed("!=", is_float, _word(0))) as (whole, half):
            with whole:
                _store(b, value, target)
            with half:
                _store(b, _narrow(b, value), target)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def unpacked(context, codes, scale, target):
    """32 weights in MXFP4 -> the same in bfloat16, which holds them, and which products of pairs take."""

    def codegen(context, b, signature, args):
        even, odd = [b.bitcast(x, _WORDS) for x in _pair_of_mxfp4(b, args[0], args[1], HAS_PERMUTE)]
        _store(b, b.or_(b.lshr(even, _words(16)), b.and_(odd, _words(0xFFFF0000))), args[2])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen
