"""Weights of attention for Numba: scores of several heads beside each other become weights, values are summed by them.

Scores and weights are float32 [keys, heads], `pieces` heads, as `cpu_vectors.tile` writes the products of rows of keys
with as many queries: a vector holds those of some keys one after the other, lane n that of head n % pieces. Addresses
are int64.
"""

# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from muse_fn.kernels.cpu_vectors import (
    _F32,
    _FLOATS,
    _WORDS,
    LANES,
    _fma,
    _load,
    _loop,
    _pair_of_bf16,
    _plus,
    _prefetch,
    _splat,
    _store,
    _word,
    _words,
)

LOWEST = -3.4e38  # below every score: the first top, from which a sum of nothing is brought to the next
# Bytes: in lanes as above the tops so far, sums of weights in parts, factors that bring sums to a new top.
STATE = 64 * 3


def _exp(b, x):
    """e^x lane by lane, as cpu_scalars.exp."""

    def every(value):
        return ir.Constant(_FLOATS, [value] * LANES)

    def either(condition, one, other):
        return b.select(b.fcmp_ordered(condition, x, every(one)), every(one), other)

    inside = either(">", 88.0, either("<", -87.3, x))
    n = b.fsub(_fma(b, inside, every(1.44269504), every(12582912.0)), every(12582912.0))
    r = _fma(b, n, every(2.12194440e-4), _fma(b, n, every(-0.693359375), inside))
    p = every(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = _fma(b, p, r, every(factor))
    p = b.fadd(_fma(b, b.fmul(p, r), r, r), every(1.0))
    power = b.bitcast(b.shl(b.add(b.fptosi(n, _WORDS), _words(127)), _words(23)), _FLOATS)
    found = b.select(b.fcmp_ordered("<", x, every(-87.3)), every(0.0), b.fmul(p, power))
    return b.select(b.fcmp_unordered("uno", x, x), x, found)


def soften(pieces):
    """An intrinsic (scores, vectors, scale, state): scores become weights e^((score - top) * scale), where the state's
    top becomes that of these scores too, its sums are brought there and grow by these. A score that is no number leaves
    no sum."""

    def codegen(context, b, signature, args):
        scores, count, scale, state = args
        scale, before, sums = _splat(b, scale), *(_load(b, _plus(b, state, n), _FLOATS) for n in (0, 64))

        def at(n):
            return _plus(b, scores, b.mul(n, _word(64)))

        def higher(x, best):
            return b.select(b.fcmp_ordered(">", x, best), x, best)

        (tops,) = _loop(b, count, [before], lambda n, found: [higher(_load(b, at(n), _FLOATS), found[0])])
        step = LANES // 2
        while step >= pieces:  # over all keys of a vector
            turned = ir.Constant(_WORDS, [(lane + step) % LANES for lane in range(LANES)])
            tops = higher(b.shuffle_vector(tops, tops, turned), tops)
            step //= 2
        less = _exp(b, b.fmul(b.fsub(before, tops), scale))

        def weighed(n, found):
            weights = _exp(b, b.fmul(b.fsub(_load(b, at(n), _FLOATS), tops), scale))
            _store(b, weights, at(n))
            return [b.fadd(weights, found[0])]

        (sums,) = _loop(b, count, [b.fmul(sums, less)], weighed)
        for n, made in enumerate((tops, sums, less)):
            _store(b, made, _plus(b, state, 64 * n))
        return context.get_dummy_value()

    def typed(context, scores, count, scale, state):
        return types.void(types.int64, types.int64, types.float32, types.int64), codegen

    return intrinsic(typed)


def weigh(pieces):
    """An intrinsic (v, stride, count, p, sums, sums_stride, coming, step): adds to each of `pieces` rows of 32 sums,
    spread float32, the 32 bfloat16 at each of `count` rows of v times their weights p [count, pieces]; strides in
    bytes, count >= 1. Asks for as much `step` bytes from each other at `coming`."""

    def codegen(context, b, signature, args):
        v, stride, count, p, sums, sums_stride, coming, step = args
        places = [_plus(b, sums, b.mul(sums_stride, _word(m)), 64 * half) for m in range(pieces) for half in (0, 1)]

        def body(n, found):
            _prefetch(b, _plus(b, coming, b.mul(step, n)))
            values, weights = _pair_of_bf16(b, _plus(b, v, b.mul(stride, n))), _plus(b, p, b.mul(n, _word(4 * pieces)))
            factors = [_splat(b, _load(b, _plus(b, weights, 4 * m), _F32)) for m in range(pieces)]
            return [_fma(b, factors[place // 2], values[place % 2], x) for place, x in enumerate(found)]

        for made, at in zip(_loop(b, count, [_load(b, at, _FLOATS) for at in places], body), places, strict=True):
            _store(b, made, at)
        return context.get_dummy_value()

    def typed(context, v, stride, count, p, sums, sums_stride, coming, step):
        return types.void(*[types.int64] * 8), codegen

    return intrinsic(typed)
