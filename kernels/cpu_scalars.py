"""Numbers for compiled CPU forms: bfloat16 and float32, the exponential, arguments of a form."""

# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
import numba
import numpy as np

from muse_fn.kernels.cpu_vectors import bits_of, double_at, float_of, floats, halves, int_at, integers, octets, words

inline = numba.njit(fastmath={"contract"}, error_model="numpy")  # no reordering: `exp` counts on its roundings
in_any_order = numba.njit(fastmath={"reassoc", "contract"}, error_model="numpy")  # for sums


@inline
def argument(a, n):
    """The n-th argument of a form, an int64."""
    return int_at(a + 8 * n)


@inline
def real(a, n):
    """The n-th argument of a form, a float64, as float32."""
    return np.float32(double_at(a + 8 * n))


@inline
def f32(address, count):
    """An array of float32 at an address."""
    return numba.carray(floats(address), (count,))


@inline
def bf16(address, count):
    """An array of bfloat16 at an address, as uint16."""
    return numba.carray(halves(address), (count,))


@inline
def bytes_at(address, count):
    """An array of uint8 at an address."""
    return numba.carray(octets(address), (count,))


@inline
def i32(address, count):
    """An array of int32 at an address."""
    return numba.carray(words(address), (count,))


@inline
def i64(address, count):
    """An array of int64 at an address."""
    return numba.carray(integers(address), (count,))


@inline
def wide(half):
    """bfloat16 -> float32."""
    return float_of(np.uint32(half) << np.uint32(16))


@inline
def narrow(x):
    """float32 -> bfloat16, to nearest, ties to even; what is no number stays none."""
    bits = bits_of(x)
    up = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.uint16(up if x == x else np.uint32(0x7FC0))


@inline
def exp(x):
    """e^x within 2 units of the last place: 2^n times a polynomial over ±ln(2) / 2; 0 below -87.3, where results
    would be subnormal, infinity from 88.8 on."""
    magic = np.float32(12582912.0)  # 1.5 * 2^23: a sum with it has no fraction
    inside = min(max(x, np.float32(-88.0)), np.float32(89.0)) if x == x else np.float32(0.0)
    n = (inside * np.float32(1.44269504) + magic) - magic
    r = (inside - n * np.float32(0.693359375)) - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    # 2^n in two factors: n may be 128.
    half = np.int32(n) >> np.int32(1)
    first = float_of(np.uint32(half + np.int32(127)) << np.uint32(23))
    second = float_of(np.uint32(np.int32(n) - half + np.int32(127)) << np.uint32(23))
    found = p * first * second
    found = np.float32(0.0) if x < np.float32(-87.3) else found
    return found if x == x else x


@inline
def log(x):
    """The natural logarithm of a normal number above 0, within 3 units of the last place: of m in 2^n * m between the
    roots of 1/2 and 2, as 2 artanh((m - 1) / (m + 1)), whose series goes on with a term below 3e-9 of it."""
    bits = bits_of(x)
    n = np.int32((bits + np.uint32(0x3F800000 - 0x3F3504F3)) >> np.uint32(23)) - np.int32(127)
    f = float_of(np.uint32(bits - (np.uint32(n) << np.uint32(23)))) - np.float32(1.0)
    s = f / (f + np.float32(2.0))
    square = s * s
    p = np.float32(1.0 / 9.0)
    for term in (1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0):
        p = p * square + np.float32(term)
    far = np.float32(n)
    return far * np.float32(0.693359375) + (
        (far * np.float32(-2.12194440e-4) + np.float32(2.0) * s * square * p) + np.float32(2.0) * s
    )


@inline
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return np.float32(1.0) / (np.float32(1.0) + exp(-x))


@inline
def tanh(x):
    """Within 3 units of the last place: a polynomial near 0, where the other form would lose what is left of 1."""
    square, size = x * x, x if x > np.float32(0.0) else -x
    p = np.float32(-5.70498872745e-3)
    p = p * square + np.float32(2.06390887954e-2)
    p = p * square + np.float32(-5.37397155531e-2)
    p = p * square + np.float32(1.33314422036e-1)
    p = p * square + np.float32(-3.33332819422e-1)
    low = exp(np.float32(-2.0) * size)
    far = (np.float32(1.0) - low) / (np.float32(1.0) + low)
    far = far if x > np.float32(0.0) else -far
    near = p * square * x + x
    return near if size < np.float32(0.625) else far
