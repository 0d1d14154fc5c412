"""Words and small random things that the synthetic conversations are filled with."""

from random import Random

NAMES = (
    "Ana Ben Carla David Emma Farid Grace Hugo Ines Jonas Kate Liam Maria Nora Omar Paula Quinn Rosa Sam Tara Uma "
    "Victor Wei Xenia Yuki Zoe Alice Bob Carol Dan Eva Frank Gina Henry Ivan Julia"
).split()

ONE_WORD_CITIES = (
    "Paris London Berlin Rome Madrid Tokyo Oslo Vienna Prague Cairo Lima Delhi Boston Chicago Dublin Athens "
    "Lisbon Warsaw Zurich Munich Sydney Toronto Seoul Beijing Nairobi Havana Kyoto Osaka Milan Geneva Hamburg "
    "Denver Seattle Moscow Istanbul Bangkok Singapore Helsinki Stockholm Copenhagen Amsterdam Brussels "
    "Budapest Lagos Bogota Santiago"
).split()
CITIES = [
    *ONE_WORD_CITIES,
    "New York",
    "San Francisco",
    "Los Angeles",
    "Cape Town",
    "Hong Kong",
    "Buenos Aires",
    "Mexico City",
    "Paris, France",
    "San Francisco, CA",
    "London, UK",
    "Berlin, Germany",
]

NOUNS = (
    "apple river table cloud stone garden window bread mountain lamp bird letter bridge forest coffee paper summer "
    "winter door train music dog cat horse house tree road boat star moon sun rain snow fire water book pen chair "
    "cup plate shoe hat coat king queen child friend teacher doctor farmer city village island ocean lake field "
    "hill valley banana lemon cherry potato carrot tomato cheese butter sugar salt honey egg fish tiger lion wolf "
    "bear mouse rabbit frog snake eagle"
).split()

WORDS = (
    "the a one my your this that every no some blue red green yellow black white small big old new happy sad quick "
    "slow warm cold bright dark quiet loud soft hard sweet kind brave calm is was has sees likes finds takes gives "
    "makes runs walks jumps sings sleeps reads writes eats drinks opens closes and or but with without over under "
    "near behind in on at for from to into about now then here there today tomorrow never always often again very "
    "too well fox hello world yes good night morning evening I you we they he she it are am be can will not do does "
    "go come see know think like want need time day year way man woman people life hand part place case week work "
    "point number fact jumped lazy brown"
).split()

THINGS = "apples books coins pens eggs cards balls stamps shells cups keys stones flowers cookies toys".split()
COLOURS = "red blue green yellow white black orange purple pink brown".split()
LANGUAGES = "French German Spanish Italian Japanese Polish Dutch Greek Turkish Korean".split()
DEVICES = ["lamp", "heater", "fan", "radio", "oven", "kitchen light", "bedroom light", "TV", "alarm", "camera"]
SKY = ["sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "clear", "stormy", "light rain", "partly cloudy"]
WORLD = "é ü ñ ø ç 你好 世界 мир Grüße café naïve señor 😀 🎉 → ± € ß".split()

SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
).split()

SHORT = "don't it's I'm that's can't you're let's isn't won't o'clock what's we'll didn't Ana's dog's".split()
RANGES = (
    (0xA1, 0x17F),
    (0x391, 0x3C9),
    (0x410, 0x44F),
    (0x4E00, 0x9FFF),
    (0x3041, 0x3096),
    (0x1F300, 0x1F64F),
    (0x2190, 0x21FF),
)

LETTERS = "abcdefghijklmnopqrstuvwxyz"
ONSETS = "b c d f g h j k l m n p r s t v w z bl br ch cl dr fl gr kr pl pr sh sk st th tr".split()
RHYMES = "a e i o u an en in on un ar er ir or ur al el il ol ai ea oo ee ast ent ink olm umb".split()


def invented(rng: Random) -> str:
    """A word nobody has seen: "blorvent"."""
    return "".join(rng.choice(ONSETS) + rng.choice(RHYMES) for _ in range(rng.randint(1, 3)))


def scramble(rng: Random, low: int = 1, high: int = 6) -> str:
    """Letters and digits in any order, some in capitals."""
    pool = rng.choice((LETTERS, LETTERS, LETTERS.upper(), "0123456789", LETTERS + LETTERS.upper() + "0123456789"))
    return "".join(rng.choice(pool) for _ in range(rng.randint(low, high)))


def foreign(rng: Random) -> str:
    """A few letters or signs of one of the world's scripts."""
    low, high = rng.choice(RANGES)
    text = "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 4)))
    return text if text.isprintable() else rng.choice(WORLD)


def some_word(rng: Random) -> str:
    """A common, rare, invented or scrambled word."""
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(WORDS if rng.random() < 0.6 else NOUNS)
    if kind < 0.7:
        return invented(rng)
    if kind < 0.78:
        return rng.choice(NAMES if rng.random() < 0.5 else CITIES)
    if kind < 0.83:
        return rng.choice(SHORT)
    if kind < 0.86:
        return rng.choice(WORLD) if rng.random() < 0.5 else foreign(rng)
    return scramble(rng) if rng.random() < 0.7 else str(rng.randint(0, 9999))


def phrase(rng: Random, most: int = 8) -> str:
    """One to `most` words, sometimes with capitals and punctuation inside."""
    words = [some_word(rng) for _ in range(rng.randint(1, most))]
    if rng.random() < 0.15:
        words = list(" ".join(words).replace(" ", ""))[: 2 * most]
    if rng.random() < 0.15:
        at = rng.randrange(len(words))
        words[at] += rng.choice((",", ";", ":", "!", "?", "...", " -"))
    text = (" " if rng.random() < 0.95 else "\n").join(words)
    style = rng.random()
    return (
        text.capitalize() if style < 0.2 else text.upper() if style < 0.27 else text.title() if style < 0.32 else text
    )


def listing(rng: Random) -> str:
    """A long phrase: many words, or a few words again and again."""
    words = [some_word(rng) for _ in range(rng.randint(2, 24))]
    return " ".join(words * rng.randint(1, max(1, 40 // len(words))))


def filler(rng: Random) -> str:
    """A long text of no use."""
    words = [some_word(rng) for _ in range(rng.randint(1, 60))]
    text = " ".join(words)
    return (text + rng.choice((" ", ". ", "\n"))) * rng.randint(1, max(1, 500 // (len(words) * 4)))


def topic(rng: Random) -> str:
    """What one searches for: "cheap lamps to Oslo", "how to make bread"."""
    forms = (
        "{a} {n} in {c}",
        "{a} {n} to {c}",
        "how to make {n}",
        "{n} for {m}",
        "{n} about {m}",
        "the best {n} of {c}",
        "{a} {n}",
    )
    noun, other = rng.choice(NOUNS), rng.choice(NOUNS)
    return rng.choice(forms).format(a=rng.choice(WORDS), n=noun, m=other, c=rng.choice(CITIES))


def code(rng: Random) -> str:
    """A number or name of a thing: "A-1234", "48213", "blor_7"."""
    head, digits = scramble(rng, 1, 3).upper(), str(rng.randint(0, 99999))
    return rng.choice(
        (f"{head}-{digits}", f"{head}{digits}", digits, f"#{digits}", f"{invented(rng)}_{digits}", head + head)
    )


def person(rng: Random) -> str:
    """A first name, sometimes an invented one."""
    return rng.choice(NAMES) if rng.random() < 0.7 else invented(rng).capitalize()


def city(rng: Random) -> str:
    """A city, sometimes an invented one."""
    return rng.choice(CITIES) if rng.random() < 0.75 else invented(rng).capitalize()


def casing(rng: Random, text: str) -> str:
    """The same request as people type it: lower case, capitals, without the final stop, with a courtesy."""
    style = rng.random()
    if style < 0.25:
        text = text.lower()
    elif style < 0.29:
        text = text.upper()
    if rng.random() < 0.25 and text[-1] in ".?!":
        text = text[:-1]
    return text
