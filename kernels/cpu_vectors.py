"""Vectors for Numba: what its language has no words for, written as LLVM instructions that compiled forms call.

Addresses are int64. A matrix is read 32 inputs at a time, as 16 words of two bfloat16 or 16 bytes of two 4-bit codes;
the even inputs are the low halves. Where the processor multiplies pairs of bfloat16, the matrix's factor lies as it is,
in bfloat16; elsewhere it lies `spread`: for each 32 inputs the 16 even ones, then the 16 odd ones, as float32. Nothing
here rounds but the sums themselves: MXFP4 times its scale is exact in float32. Products of pairs take subnormal
bfloat16, below 1.2e-38, for zero; those with codes are scaled when a pair is summed, which two inputs above 2e37 may
overflow.
"""

# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

LANES = 16
# As Numba compiles, which may have been told to do so for another processor.
FEATURES = (get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES).split(",")
HAS_PERMUTE = "+avx512f" in FEATURES  # a table of 16 values held in one register
HAS_DOTS = "+avx512bf16" in FEATURES  # products of pairs of bfloat16, added to float32
PIECES = (8, 4, 2, 1) if HAS_PERMUTE else (4, 2, 1)  # rows of x whose sums fit the registers, beside ROWS of a matrix
ROWS = 2 if HAS_PERMUTE else 1  # of a matrix whose products are many operations; else two are read slower than one
HAS_WORDS = HAS_DOTS and "+avx512bw" in FEATURES  # and a table of 32 values of 16 bits
BF16_ROWS = 1 if HAS_DOTS else ROWS
FACTOR_BYTES = 64 if HAS_DOTS else 128  # of 32 inputs in the factor of a matrix of bfloat16 or codes
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_F32, _I8, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_FLOATS, _WORDS, _BYTES = (ir.VectorType(kind, LANES) for kind in (_F32, _I32, _I8))
_SHORTS = ir.VectorType(_I16, 2 * LANES)


def _word(value):
    return ir.Constant(_I64, value)


def _words(value):
    return ir.Constant(_WORDS, [value] * LANES)


def _external(b, name, result, *given):
    return cgutils.get_or_insert_function(b.module, ir.FunctionType(result, given), name)


def _load(b, address, kind):
    found = b.load(b.inttoptr(address, kind.as_pointer()))
    found.align = 1
    return found


def _store(b, value, address):
    b.store(value, b.inttoptr(address, value.type.as_pointer())).align = 1


def _plus(b, address, *counts):
    for count in counts:
        address = b.add(address, count if isinstance(count, ir.Value) else _word(count))
    return address


def _splat(b, value):
    one = b.insert_element(ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined), value, ir.Constant(_I32, 0))
    return b.shuffle_vector(one, one, ir.Constant(_WORDS, [0] * LANES))


def _fma(b, x, y, z):
    return b.call(_external(b, "llvm.fma.v16f32", _FLOATS, *[_FLOATS] * 3), [x, y, z])


def _pair_of_bf16(b, address):
    both = _load(b, address, _WORDS)
    return [b.bitcast(x, _FLOATS) for x in (b.shl(both, _words(16)), b.and_(both, _words(0xFFFF0000)))]


def _dots(b, pairs, others, sums):
    """sums plus the products of two bfloat16 each in words. LLVM wants another type since, and puts it in itself."""
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    return b.call(_external(b, name, _FLOATS, _FLOATS, _WORDS, _WORDS), [sums, pairs, others])


def _e2m1(b, codes, has_permute):
    """Codes in the low four bits of words, whatever is above -> their values."""
    if has_permute:
        table = ir.Constant(_FLOATS, [*E2M1, *(-x for x in E2M1)])
        return b.call(_external(b, "llvm.x86.avx512.permvar.sf.512", _FLOATS, _FLOATS, _WORDS), [table, codes])
    exponent, mantissa = b.and_(b.lshr(codes, _words(1)), _words(3)), b.and_(codes, _words(1))
    is_normal = b.icmp_unsigned("!=", exponent, _words(0))
    shift = b.sub(exponent, b.zext(is_normal, _WORDS))
    twice = b.select(is_normal, b.shl(b.or_(mantissa, _words(2)), shift), mantissa)
    bits = b.bitcast(b.fmul(b.uitofp(twice, _FLOATS), ir.Constant(_FLOATS, [0.5] * LANES)), _WORDS)
    return b.bitcast(b.or_(bits, b.shl(b.and_(codes, _words(8)), _words(28))), _FLOATS)


def _e8m0(b, byte):
    """A scale's byte -> float32: 2^(byte - 127), 0 the subnormal 2^-127, 255 not a number. From a table: it takes
    longer to make than all else that 32 codes need."""
    bits = ir.Constant(ir.ArrayType(_I32, 256), [0x0040_0000, *(n << 23 for n in range(1, 255)), 0x7FC0_0000])
    table = cgutils.global_constant(b.module, "e8m0", bits)
    return b.bitcast(b.load(b.gep(table, [ir.Constant(_I32, 0), b.zext(byte, _I32)])), _F32)


def _pair_of_mxfp4(b, codes_at, scale_at, has_permute):
    codes, scale = b.zext(_load(b, codes_at, _BYTES), _WORDS), _splat(b, _e8m0(b, _load(b, scale_at, _I8)))
    both = codes, b.lshr(codes, _words(4))
    return [b.fmul(_e2m1(b, half, has_permute), scale) for half in both]


def _words_of_mxfp4(b, codes_at, scale_at):
    """32 codes as 16 pairs of bfloat16, and their scale."""
    codes = b.zext(_load(b, codes_at, _BYTES), _WORDS)
    # Five bits choose among 32 values, which are 16 twice: the fifth of an even one belongs to the odd one.
    both = b.bitcast(b.or_(codes, b.shl(codes, _words(12))), _SHORTS)
    table = ir.Constant(_SHORTS, 2 * [0, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0,
        0x8000, 0xBF00, 0xBF80, 0xBFC0, 0xC000, 0xC040, 0xC080, 0xC0C0])  # fmt: skip
    found = b.call(_external(b, "llvm.x86.avx512.permvar.hi.512", _SHORTS, _SHORTS, _SHORTS), [table, both])
    return b.bitcast(found, _WORDS), _splat(b, _e8m0(b, _load(b, scale_at, _I8)))


def _scaled_dots(b, own, other, sums):
    """sums plus products of codes, which are exact, times their scale."""
    pairs, scale = own
    return _fma(b, scale, _dots(b, pairs, other, ir.Constant(_FLOATS, [0.0] * LANES)), sums)


def _sums(b, vectors, added=None):
    """Up to 16 vectors -> one, whose lane n is the sum of vector n's lanes, or what else `added` makes of two: halves
    are put together pair by pair."""
    added = added or b.fadd
    for step in (1, 2, 4, 8):
        near = [lane // (2 * step) * 2 * step + lane % step + 16 * (lane // step % 2) for lane in range(LANES)]
        masks = [ir.Constant(_WORDS, [n + shift for n in near]) for shift in (0, step)]
        pairs = [(vectors[n], vectors[min(n + 1, len(vectors) - 1)]) for n in range(0, len(vectors), 2)]
        vectors = [added(*(b.shuffle_vector(*pair, mask) for mask in masks)) for pair in pairs]
    return vectors[0]


def _prefetch(b, address, again=0):
    form = _external(b, "llvm.prefetch.p0", ir.VoidType(), _I8.as_pointer(), _I32, _I32, _I32)
    # To be read, how often (3 at most), data. What is read once: the caches keep what is read again.
    words = [ir.Constant(_I32, n) for n in (0, again, 1)]
    b.call(form, [b.inttoptr(address, _I8.as_pointer()), *words])


def _loop(b, count, starts, body):
    """body(n, values) -> new values for n = 0 … count - 1, at least once; the last values."""
    before, inside, after = b.block, b.append_basic_block("inside"), b.append_basic_block("after")
    b.branch(inside)
    b.position_at_end(inside)
    n, *values = [b.phi(start.type) for start in (_word(0), *starts)]
    made = [b.add(n, _word(1)), *body(n, values)]
    for phi, start, new in zip((n, *values), (_word(0), *starts), made, strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(new, b.block)
    b.cbranch(b.icmp_signed("<", made[0], count), inside, after)
    b.position_at_end(after)
    return made[1:]


def _pair_of_f32(b, address):
    return [_load(b, _plus(b, address, n), _FLOATS) for n in (0, 64)]


def _readers(kind, has_permute):
    """How 32 inputs of a matrix (at an address, its scale at another) and of its factor become vectors, and how the
    products of two vectors are added to sums."""
    if kind == "f32":
        return lambda b, at, _: _pair_of_f32(b, at), _pair_of_f32, _fma
    if kind == "bf16" and HAS_DOTS:
        return lambda b, at, _: [_load(b, at, _WORDS)], lambda b, at: [_load(b, at, _WORDS)], _dots
    if kind == "mxfp4" and HAS_WORDS:
        read = _words_of_mxfp4
        return lambda b, at, scale_at: [read(b, at, scale_at)], lambda b, at: [_load(b, at, _WORDS)], _scaled_dots
    factor = _pair_of_bf16 if HAS_DOTS else _pair_of_f32
    if kind == "bf16":
        return lambda b, at, _: _pair_of_bf16(b, at), factor, _fma
    return lambda b, at, scale_at: _pair_of_mxfp4(b, at, scale_at, has_permute), factor, _fma


def tile(kind, rows, pieces, has_permute=HAS_PERMUTE):
    """An intrinsic (w, stride, scales, scale_stride, x, groups, out, coming, step): the products of `rows` rows of a
    matrix with `pieces` rows of x, float32 [rows, pieces] and what else fills 16 places, written to `out`.

    kind is bf16, mxfp4 or f32; strides are bytes from row to row; x is [groups, pieces, 32], float32 for f32, else as
    above. groups is at least 1. While rows are read as many that lie `step` bytes from each other at `coming` are asked
    for, to be read later. The order of a sum is the same for any number of rows and pieces: a row's bits do not depend
    on its neighbours.
    """
    width, x_width = {"bf16": (64, FACTOR_BYTES), "mxfp4": (16, FACTOR_BYTES), "f32": (128, 128)}[kind]
    of_matrix, of_factor, added = _readers(kind, has_permute)

    def codegen(context, b, signature, args):
        w, stride, scales, scale_stride, x, groups, out, coming, step = args

        def body(n, sums):
            sums, place, matrix = list(sums), b.mul(n, _word(width)), []
            for r in range(rows):
                at = _plus(b, w, b.mul(stride, _word(r)), place)
                _prefetch(b, _plus(b, coming, b.mul(step, _word(r)), place))
                matrix.append(of_matrix(b, at, _plus(b, scales, b.mul(scale_stride, _word(r)), n)))
            for m in range(pieces):
                factor = of_factor(b, _plus(b, x, b.mul(n, _word(x_width * pieces)), x_width * m))
                for r in range(rows):
                    place = r * pieces + m
                    for own, other in zip(matrix[r], factor, strict=True):
                        sums[place] = added(b, own, other, sums[place])
            return sums

        made = _loop(b, groups, [ir.Constant(_FLOATS, [0.0] * LANES)] * (rows * pieces), body)
        _store(b, _sums(b, made), out)
        return context.get_dummy_value()

    def typed(context, w, stride, scales, scale_stride, x, groups, out, coming, step):
        return types.void(*[types.int64] * 9), codegen

    return intrinsic(typed)


@intrinsic
def spread(context, source, target):
    """32 bfloat16 -> the same in the factor of a matrix."""

    def codegen(context, b, signature, args):
        if HAS_DOTS:
            _store(b, _load(b, args[0], _WORDS), args[1])
            return context.get_dummy_value()
        for half, values in enumerate(_pair_of_bf16(b, args[0])):
            _store(b, values, _plus(b, args[1], 64 * half))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _loader(kind, result):
    def typed(context, address):
        return result(types.int64), lambda context, b, signature, args: _load(b, args[0], kind)

    return intrinsic(typed)


int_at, double_at = _loader(_I64, types.int64), _loader(ir.DoubleType(), types.float64)


@intrinsic
def claim(context, address):
    """The number at an address, which is one more afterwards, whoever else claims."""

    def codegen(context, b, signature, args):
        return b.atomic_rmw("add", b.inttoptr(args[0], _I64.as_pointer()), _word(1), "monotonic")

    return types.int64(types.int64), codegen


def _pointer(kind, result):
    def typed(context, address):
        signature = types.CPointer(result)(types.int64)
        return signature, lambda context, b, signature, args: b.inttoptr(args[0], kind.as_pointer())

    return intrinsic(typed)


# For numba.carray; halves are the 16 bits of bfloat16.
floats, halves, octets = _pointer(_F32, types.float32), _pointer(_I16, types.uint16), _pointer(_I8, types.uint8)
words, integers = _pointer(_I32, types.int32), _pointer(_I64, types.int64)


@intrinsic
def float_of(context, bits):
    """The float32 that has these 32 bits."""

    def codegen(context, b, signature, args):
        return b.bitcast(args[0], _F32)

    return types.float32(types.uint32), codegen


@intrinsic
def bits_of(context, value):
    """The 32 bits of a float32."""

    def codegen(context, b, signature, args):
        return b.bitcast(args[0], _I32)

    return types.uint32(types.float32), codegen


@intrinsic
def ask_for(context, address):
    """Has the 64 bytes around an address fetched, for later; there need not be any."""

    def codegen(context, b, signature, args):
        _prefetch(b, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def workspace(context, size):
    """The address of `size` bytes, a literal, on the stack of the function that this is compiled into."""
    if not isinstance(size, types.IntegerLiteral):
        return None
    count = size.literal_value

    def codegen(context, b, signature, args):
        with b.goto_entry_block():  # once, and as it is: Numba's own way would write zeros element by element
            place = b.alloca(ir.ArrayType(_I8, count))
        place.align = 64
        return b.ptrtoint(place, _I64)

    return types.int64(size), codegen
