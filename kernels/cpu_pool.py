"""Threads that help with compiled forms, and how a caller shares its work with them.

A caller opens a job, works at it itself and closes it when nothing is left to claim; helpers join while it is open.
The caller waits for those who have joined, never for one that the system has not let run: a team that starts and ends
together would lose a whole time slice whenever another program has the processor. A helper without work looks out for
the next job for a moment, as long as a step's next one takes to come, and then sleeps; at the end of a step at once.
While one caller has the helpers, another works alone.
"""

# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
import platform

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from muse_fn.kernels.cpu_scalars import argument, inline

# Of the state, int64 each: the job as a word, what is called with what, how many may join, whether a caller has it,
# how many sleep, whether helpers are to end, how many live; addresses of C functions, of which RETIRE may be none (0);
# whether no job is coming soon; room for a mutex and a condition.
(JOB, FORM, GIVEN, LIMIT, BUSY, ASLEEP, ENDING, ALIVE, LOCK, UNLOCK, WAIT, WAKE, YIELD, RETIRE, RESTING, MUTEX,
    CONDITION) = *range(15), 16, 32  # fmt: skip
WORDS = 48
OPEN = 1 << 16  # of the job's word: below it how many have joined, above it the job's number
SOFT = 1  # how OpenMP is to give up its threads: what it knows is kept
PATIENCE = 4000  # looks before a helper sleeps: about 0.2 milliseconds

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


def _place(b, address):
    return b.inttoptr(address, _I64.as_pointer())


@intrinsic
def read(context, address):
    """The int64 at an address, in one order for all threads."""

    def codegen(context, b, signature, args):
        return b.load_atomic(_place(b, args[0]), "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic
def write(context, address, value):
    """Stores an int64 likewise."""

    def codegen(context, b, signature, args):
        b.store_atomic(args[1], _place(b, args[0]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def add(context, address, value):
    """Adds to an int64 likewise."""

    def codegen(context, b, signature, args):
        return b.atomic_rmw("add", _place(b, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def replaced(context, address, old, new):
    """Whether the int64 was `old` and is now `new`."""

    def codegen(context, b, signature, args):
        pair = b.cmpxchg(_place(b, args[0]), args[1], args[2], "seq_cst", "seq_cst")
        return b.extract_value(pair, 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic
def pause(context):
    """Tells the processor that this is a loop that waits, where there is a word for it."""

    def codegen(context, b, signature, args):
        if platform.machine() in ("x86_64", "AMD64"):
            form = cgutils.get_or_insert_function(b.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause")
            b.call(form, [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def run(context, form, first, second):
    """Calls a C function of up to two addresses."""

    def codegen(context, b, signature, args):
        anything = _I8.as_pointer()
        kind = ir.FunctionType(_I32, [anything, anything]).as_pointer()
        b.call(b.inttoptr(args[0], kind), [b.inttoptr(x, anything) for x in args[1:]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@inline
def in_parallel(pool, form, given, threads):
    """Calls the function at `form` with `given` here and on up to `threads` - 1 helpers at once, all of whom claim
    pieces of its work. `pool` is the address of the helpers' state; 0 for none."""
    if threads <= 1 or pool == 0 or not replaced(pool + 8 * BUSY, 0, 1):
        run(form, given, 0)
        return
    if argument(pool, RETIRE):
        run(argument(pool, RETIRE), SOFT, 0)
    write(pool + 8 * RESTING, 0)
    write(pool + 8 * FORM, form)
    write(pool + 8 * GIVEN, given)
    write(pool + 8 * LIMIT, threads - 1)
    write(pool + 8 * JOB, ((read(pool + 8 * JOB) // (2 * OPEN)) + 1) * (2 * OPEN) + OPEN)
    if read(pool + 8 * ASLEEP) > 0:
        run(argument(pool, LOCK), pool + 8 * MUTEX, 0)
        run(argument(pool, WAKE), pool + 8 * CONDITION, 0)
        run(argument(pool, UNLOCK), pool + 8 * MUTEX, 0)
    run(form, given, 0)
    add(pool + 8 * JOB, -OPEN)
    looks = 0
    while read(pool + 8 * JOB) % OPEN:
        looks += 1
        if looks % 64:
            pause()
        else:
            run(argument(pool, YIELD), 0, 0)  # a helper in the middle of its piece may want this processor
    write(pool + 8 * BUSY, 0)


@inline
def rest(pool):
    """Lets helpers sleep at once until the next job: whoever follows, PyTorch's own threads perhaps, is to find the
    processors free. A thread that starts beside one that looks out for work may wait for milliseconds."""
    if pool:
        write(pool + 8 * RESTING, 1)


@inline
def _is_wanted(pool, served):
    """Whether a job is open that this helper has not had yet."""
    job = read(pool + 8 * JOB)
    return job // OPEN % 2 == 1 and job // (2 * OPEN) != served


@inline
def _sleep(pool, served):
    run(argument(pool, LOCK), pool + 8 * MUTEX, 0)
    add(pool + 8 * ASLEEP, 1)
    while not _is_wanted(pool, served) and not read(pool + 8 * ENDING):
        run(argument(pool, WAIT), pool + 8 * CONDITION, pool + 8 * MUTEX)
    add(pool + 8 * ASLEEP, -1)
    run(argument(pool, UNLOCK), pool + 8 * MUTEX, 0)


def help_on(pool):
    """What a helper does until it is told to end: looks for a job, joins it, works at it, leaves it."""
    served, looks = 0, 0
    while not read(pool + 8 * ENDING):
        job = read(pool + 8 * JOB)
        if not _is_wanted(pool, served):
            looks += 1
            if looks < PATIENCE and not read(pool + 8 * RESTING):
                pause()
            else:
                _sleep(pool, served)
                looks = 0
        elif job % OPEN >= read(pool + 8 * LIMIT):
            served = job // (2 * OPEN)
        elif replaced(pool + 8 * JOB, job, job + 1):
            served, looks = job // (2 * OPEN), 0
            run(read(pool + 8 * FORM), read(pool + 8 * GIVEN), 0)
            add(pool + 8 * JOB, -1)
    add(pool + 8 * ALIVE, -1)
