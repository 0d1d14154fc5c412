"""Small sums, asked in many ways, alone or following on from the last result."""

# ruff: noqa: RUF001, RUF003 (the signs × and − are meant)

from random import Random

from train.turns import Memory, Turn
from train.words import NAMES, SMALL, THINGS, casing

MOST = 20
WORD_OF = {"+": "plus", "-": "minus", "×": "times"}
KIND_OF = {"+": "a sum", "-": "a difference", "×": "a product"}
TOO_LARGE = "I only know sums with numbers up to 20."
TOO_MANY = "I only know sums of two numbers."

FORMS = {
    "+": (
        "{a} + {b}",
        "{a} + {b}",
        "{a}+{b}",
        "{a} plus {b}",
        "{a} plus {b}",
        "the sum of {a} and {b}",
        "{a} added to {b}",
    ),
    "-": (
        "{a} - {b}",
        "{a} - {b}",
        "{a}-{b}",
        "{a} minus {b}",
        "{a} minus {b}",
        "{a} − {b}",
        "{b} subtracted from {a}",
    ),
    "×": (
        *("{a} * {b}", "{a}*{b}", "{a} × {b}", "{a}×{b}", "{a} x {b}", "{a}x{b}"),
        *("{a} times {b}", "{a} times {b}", "{a} multiplied by {b}", "the product of {a} and {b}"),
    ),
}
ASKS = (
    *(
        "What is {e}?",
        "What is {e}?",
        "What is {e}?",
        "What's {e}?",
        "{e}",
        "{e}?",
        "{e} = ?",
        "{e} =",
        "{e}=",
        "How much is {e}?",
    ),
    *("Calculate {e}.", "Compute {e}.", "Can you calculate {e}?", "Tell me {e}.", "Solve {e}.", "I need to know {e}."),
    *("Work out {e}.", "What does {e} equal?", "Evaluate {e}.", "Do you know what {e} is?", "Please compute {e}."),
    *(
        "Can you tell me what {e} is?",
        "Hi, what is {e}?",
        "Hello! What is {e}?",
        "Quick question: {e}?",
        "So what is {e}?",
    ),
)
ORDERS = {
    "+": (
        "Add {a} and {b}.",
        "Add {a} to {b}.",
        "Can you add {a} and {b}?",
        "Sum {a} and {b}.",
        "Please add {a} and {b}.",
    ),
    "-": ("Subtract {b} from {a}.", "Take {b} away from {a}.", "Take {b} from {a}.", "Can you subtract {b} from {a}?"),
    "×": (
        "Multiply {a} by {b}.",
        "Multiply {a} and {b}.",
        "Can you multiply {a} by {b}?",
        "Please multiply {a} and {b}.",
    ),
}
STORIES = {
    "+": (
        "{n} has {a} {t} and gets {b} more. How many {t} does {n} have?",
        "If I have {a} {t} and buy {b} more, how many {t} do I have?",
        "I have {a} {t} and you have {b} {t}. How many {t} do we have together?",
        "There are {a} {t} on the table and {b} {t} in the box. How many {t} are there?",
    ),
    "-": (
        "{n} has {a} {t} and gives away {b}. How many {t} are left?",
        "If I have {a} {t} and eat {b}, how many are left?",
        "If I have {a} {t} and lose {b}, how many {t} do I have?",
        "I had {a} {t} and lost {b}. How many {t} do I have now?",
    ),
    "×": (
        "There are {a} boxes with {b} {t} each. How many {t} are there?",
        "{n} buys {a} bags of {b} {t}. How many {t} does {n} have?",
    ),
}
FOLLOWS = {
    "+": ("And plus {b}?", "Plus {b}?", "Now add {b}.", "Add {b} to that.", "And what if I add {b}?", "plus {b}"),
    "-": (
        "And minus {b}?",
        "Minus {b}?",
        "Now subtract {b}.",
        "Subtract {b} from that.",
        "Take away {b}.",
        "minus {b}",
    ),
    "×": ("And times {b}?", "Times {b}?", "Now multiply that by {b}.", "Multiply that by {b}.", "times {b}"),
}
PLAIN_COUNTS = (
    "Count to {z}.",
    "Count from 1 to {z}.",
    "Please count to {z}.",
    "Can you count to {z}?",
    "Count up to {z}.",
)
DOWN_COUNTS = (
    "Count down from {y}.",
    "Count down from {y} to 1.",
    "Count backwards from {y}.",
    "Count from {y} down to 1.",
)
RANGED_COUNTS = ("Count from {y} to {z}.", "Please count from {y} to {z}.", "List the numbers from {y} to {z}.")
BARE = (
    " Answer with just the number.",
    " Only the number, please.",
    " Reply with the number only.",
    " Just the number.",
)
KEYS = ("answer", "result", "value", "sum", "number", "total")
AS_JSON = (
    ' Answer as JSON with the key "{k}".',
    ' Reply with a JSON object like {{"{k}": 0}}.',
    " Answer in JSON, key {k}.",
    ' Respond in JSON: {{"{k}": <number>}}',
)


def value_of(a: int, op: str, b: int) -> int:
    """The result of a small sum."""
    return a + b if op == "+" else a - b if op == "-" else a * b


def _solved(task: str, user: str, a: int, op: str, b: int, answer: str | None = None) -> Turn:
    fact = f"{a} {WORD_OF[op]} {b} is {value_of(a, op, b)}."
    said = answer if answer is not None else f"{a} {op} {b} = {value_of(a, op, b)}."
    return Turn(task, user, fact, f"This is {KIND_OF[op]}. {fact}", said)


def _pair(rng: Random, op: str) -> tuple[int, int]:
    a, b = rng.randint(0, MOST), rng.randint(0, MOST)
    if op == "×" and rng.random() < 0.5:  # the hard half of the table more often
        a, b = rng.randint(6, MOST), rng.randint(3, MOST)
    return (b, a) if op == "-" and a < b and rng.random() < 0.5 else (a, b)


def _spelled(rng: Random, n: int) -> str:
    return SMALL[n] if 0 <= n <= MOST else str(n)


def one(rng: Random, memory: Memory) -> Turn:
    """A sum of two numbers from 0 to 20, as an expression, an order or a story."""
    op = rng.choice(memory.operations)
    a, b = _pair(rng, op)
    memory.total = value_of(a, op, b)
    kind = rng.random()
    if kind < 0.1:
        a, b = (max(a, b), min(a, b)) if op == "-" else (a, b)
        memory.total = value_of(a, op, b)
        story = rng.choice(STORIES[op]).format(a=a, b=b, n=rng.choice(NAMES), t=rng.choice(THINGS))
        return _solved("sum", story, a, op, b)
    words = rng.random() < 0.12
    shown = (_spelled(rng, a), _spelled(rng, b)) if words else (a, b)
    forms = [f for f in FORMS[op] if not words or any(c.isalpha() for c in f.replace("{a}", "").replace("{b}", ""))]
    if kind < 0.2:
        user = rng.choice(ORDERS[op]).format(a=shown[0], b=shown[1])
    else:
        user = rng.choice(ASKS).format(e=rng.choice(forms).format(a=shown[0], b=shown[1]))
    user = casing(rng, user)
    if kind > 0.9:
        user = user.rstrip() + rng.choice(BARE)
        return _solved("sum", user, a, op, b, str(memory.total))
    if kind > 0.84:
        key = rng.choice(KEYS)
        user = user.rstrip() + rng.choice(AS_JSON).format(k=key)
        return _solved("json", user, a, op, b, f'{{"{key}": {memory.total}}}')
    return _solved("sum", user, a, op, b)


def follow(rng: Random, memory: Memory) -> Turn:
    """A sum that starts from the last result, when that is small."""
    if memory.total is None or not -MOST <= memory.total <= 2 * MOST:
        return one(rng, memory)
    op = rng.choice("+-××" if 0 <= memory.total <= MOST else "+-")
    a, b = memory.total, rng.randint(0, MOST)
    memory.total = value_of(a, op, b)
    return _solved("follow-up", casing(rng, rng.choice(FOLLOWS[op]).format(b=b)), a, op, b)


def too_large(rng: Random, memory: Memory) -> Turn:
    """A sum of numbers too large or too many: said so rather than guessed."""
    op = rng.choice("+-×")
    a, b = rng.randint(MOST + 1, rng.choice((99, 999, 9999))), rng.randint(0, rng.choice((MOST, 99, 999)))
    if rng.random() < 0.5:
        a, b = b, a
    memory.total = None
    expression = rng.choice(FORMS[op]).format(a=a, b=b)
    if rng.random() < 0.3:
        sign = rng.choice((" + ", " - ", " * ", "+", " plus ", " times "))
        some = [str(rng.randint(0, MOST)) for _ in range(rng.randint(3, 5))]
        user = casing(rng, rng.choice(ASKS).format(e=sign.join(some)))
        return Turn("limits", user, "Too many.", "These are too many numbers for me.", TOO_MANY)
    user = casing(rng, rng.choice(ASKS).format(e=expression))
    return Turn("limits", user, "Too large.", "This number is too large for me.", TOO_LARGE)


def count(rng: Random, memory: Memory) -> Turn:
    """Counting up or down, at most 25 numbers."""
    del memory
    low = 1 if rng.random() < 0.6 else rng.randint(0, 20)
    high = min(30, low + rng.randint(1, 24))
    down = rng.random() < 0.25
    first, last = (high, low) if down else (low, high)
    if down and rng.random() < 0.4:
        first, last = high, 1
    plain = PLAIN_COUNTS if low == 1 and not down else DOWN_COUNTS if down and last == 1 else RANGED_COUNTS
    user = casing(rng, rng.choice(plain).format(y=first, z=last))
    said = ", ".join(str(n) for n in range(first, last + (-1 if down else 1), -1 if down else 1)) + "."
    return Turn("count", user, f"From {first} to {last}.", f"I count from {first} to {last}.", said)
