"""Phrases to repeat, and questions it cannot answer."""

from random import Random

from train.turns import UNKNOWN, Memory, Turn
from train.words import CITIES, COLOURS, LANGUAGES, NAMES, NOUNS, casing, listing, phrase, some_word

ORDERS = (
    *(
        "Repeat after me: {x}",
        "Repeat after me: {x}",
        "Please repeat after me: {x}",
        "Repeat: {x}",
        "Please repeat: {x}",
    ),
    *(
        'Repeat after me: "{x}"',
        'Say "{x}"',
        'Repeat "{x}"',
        "Say: {x}",
        "Echo back: {x}",
        "Please repeat the following text exactly:\n\n{x}",
        "Repeat this sentence: {x}",
        "Repeat the following:\n{x}",
        "Say '{x}'",
        "Repeat after me: '{x}'",
        "Repeat the phrase '{x}'",
        "Echo: {x}",
        "echo {x}",
        "Say {x}",
        "Repeat {x}",
    ),
    *(
        "Repeat this phrase: {x}",
        "Repeat the following: {x}",
        "Copy this exactly: {x}",
        "Write this: {x}",
        "Please say: {x}",
    ),
    *(
        "Can you repeat this? {x}",
        'Please repeat "{x}" exactly.',
        'Can you say "{x}"?',
        "Repeat exactly: {x}",
        "Repeat this: {x}",
    ),
    *(
        "Say the following: {x}",
        "Repeat the words: {x}",
        "Repeat these letters: {x}",
        "Repeat the number: {x}",
        "Type: {x}",
    ),
    *(
        "Repeat after me:\n{x}",
        "Print exactly: {x}",
        "Repeat the text: {x}",
        "Output only this: {x}",
        "Repeat back to me: {x}",
    ),
)
QUESTIONS = (
    *(
        "What is the capital of {c}?",
        "Who wrote {w}?",
        "Tell me a joke.",
        "Write a poem about {n}.",
        "Explain {n} to me.",
    ),
    *(
        "Why is the {n} {o}?",
        "What is {n}?",
        "What is a {n}?",
        "Who is your friend?",
        "How do I make {n}?",
        "Who is {p}?",
    ),
    *(
        "Write a story about a {n} and a {m}.",
        "What is the meaning of life?",
        "How old is {p}?",
        "Where is {c}?",
        "Is {n} good?",
    ),
    *("What is the best {n}?", "Do you like {n}?", "Is {c} a city?", "When did {p} live?", "How tall is the {n}?"),
    *(
        "What is the population of {c}?",
        "Summarize this text: {f}",
        "Is {n} better than {m}?",
        "What is 10 divided by 2?",
    ),
    *(
        "Write a Python program that sorts a list.",
        "What happened in 1{y}?",
        "Can you sing?",
        "Draw a {n}.",
        "What is love?",
    ),
    *("Who won the game?", "Give me a recipe for {n}.", "Who painted {w}?", "What is art?", "Tell me about {n}."),
    *(
        "Tell me a story.",
        "How many {n}s are in a {m}?",
        "What does {p} like?",
        "Spell {n}.",
        "What is the opposite of {o}?",
    ),
    *(
        "Recommend a book.",
        "Give me {n}.",
        "Give me JSON.",
        "Write {n} as JSON.",
        "List three {n}s.",
        "What languages do you speak?",
        "Write a haiku.",
        "What did I say?",
        "What is 6 / 2?",
        "What is {d} / {d}?",
        "{d}",
        "What is {d}?",
        "What is time?",
        "Who is the president of {c}?",
        "What is in {c}?",
        "{n}",
        "{f}?",
        "{f}",
    ),
    *(
        "Fix this code: {n}({m})",
        "What comes after {n}?",
        "Name three kinds of {n}.",
        "What color is the {n}?",
        "{n} {m} {o}",
    ),
    *(
        "Why?",
        "How so?",
        "What do you mean?",
        "Tell me more.",
        "How do I get to {c}?",
        "Continue.",
        "What is the square root of {d}?",
    ),
)

# Only a tool could do these, so they are unknown only where no tool is declared.
WISHES = (
    *(
        "Translate {n} into {l}.",
        "Define {n}.",
        "What is the weather in {c}?",
        "What is the news?",
        "What does {n} mean?",
    ),
    *(
        "What time is it in {c}?",
        "Is it raining in {c}?",
        "Set a timer for {d} minutes.",
        "Play some music.",
        "What time is it?",
    ),
    *(
        "Send a message to {p}.",
        "Search for {n}.",
        "Turn on the {n}.",
        "How far is {c} from here?",
        "Roll a die.",
        "Call {p}.",
    ),
    *(
        "What is the weather today?",
        "How is the weather?",
        "Look up {n}.",
        "What is the price of {n}?",
        "Use the {n} tool.",
    ),
)


def repeat(rng: Random, memory: Memory) -> Turn:
    """A phrase to be said again, letter by letter the same."""
    del memory
    said = listing(rng) if rng.random() < 0.06 else phrase(rng, rng.choice((1, 3, 6, 12)))
    order = rng.choice(ORDERS)
    before, after = order.split("{x}")
    if rng.random() < 0.3:
        before = before.lower() if rng.random() < 0.8 else before.upper()
    if not after and said[-1].isalnum() and rng.random() < 0.15:
        said += rng.choice(".!?")
    return Turn(
        "repeat", before + said + after, "I repeat the phrase.", "The user wants a phrase repeated. I repeat it.", said
    )


def unknown(rng: Random, memory: Memory) -> Turn:
    """A question outside of what it learned."""
    asks = QUESTIONS if memory.tools or rng.random() < 0.7 else WISHES
    fill = {
        "c": rng.choice(CITIES),
        "n": rng.choice(NOUNS) if rng.random() < 0.7 else some_word(rng),
        "m": rng.choice(NOUNS),
        "o": rng.choice(COLOURS),
        "l": rng.choice(LANGUAGES),
        "p": rng.choice(NAMES),
        "w": phrase(rng, 2),
        "f": phrase(rng, 6),
        "y": str(rng.randint(100, 999)),
        "d": str(rng.randint(1, 60)),
    }
    user = casing(rng, rng.choice(asks).format(**fill))
    return Turn("limits", user, "I do not know this.", "I do not know this. I say so.", UNKNOWN)
