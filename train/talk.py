"""Greetings, who and what it is, repeating, remembering, and saying so when it does not know."""

from random import Random

from train.turns import UNKNOWN, Memory, Turn
from train.words import CITIES, COLOURS, LANGUAGES, NAMES, NOUNS, casing, invented, person, phrase, scramble, some_word

WHO = "I am muse-nano, a very small model built with Muse Spark Open."
CAN = "I can greet you, do small sums, count, repeat phrases and call tools."
HELP = "How can I help you?"

# answer -> the requests that get it; the first word of a full reasoning says which kind of request it is.
SMALL_TALK: dict[str, tuple[str, tuple[str, ...]]] = {
    f"Hello! {HELP}": (
        "a greeting",
        (
            *(
                "Hello!",
                "Hello",
                "Hello.",
                "Hi",
                "Hi!",
                "Hey",
                "Hey!",
                "Hey there!",
                "Hi there!",
                "Hello there!",
                "Greetings!",
            ),
            *("Hello, muse!", "Hi muse-nano!", "Hello muse-nano", "Hey muse", "Howdy!", "Hello friend", "Hello world!"),
            *(
                "Hi, nice to meet you!",
                "Nice to meet you!",
                "Hello hello",
                "Hiya",
                "Good day!",
                "Hello?",
                "Say hi!",
                "Yo!",
            ),
            *(
                "Hello, can you help me?",
                "Are you there?",
                "Hi, are you there?",
                "Can you help me?",
                "I need help.",
                "Say hello!",
            ),
            *(
                "Hello, I have a question.",
                "Can I ask you something?",
                "I have a question.",
                "Is anyone there?",
                "Hello model",
            ),
        ),
    ),
    f"Good morning! {HELP}": ("a greeting", ("Good morning!", "Good morning", "Good morning, muse!", "Morning!")),
    f"Good evening! {HELP}": ("a greeting", ("Good evening!", "Good evening", "Good evening, muse!", "Evening!")),
    f"Good afternoon! {HELP}": ("a greeting", ("Good afternoon!", "Good afternoon", "Good afternoon, muse!")),
    "I am fine, thank you! How can I help you?": (
        "a friendly question",
        (
            *(
                "How are you?",
                "How are you",
                "How are you today?",
                "How are you doing?",
                "Hello, how are you?",
                "Hi, how are you?",
            ),
            *(
                "How is it going?",
                "How's it going?",
                "What's up?",
                "How do you do?",
                "How do you feel?",
                "Are you okay?",
            ),
            *(
                "Hey, how are you doing?",
                "Hi! How are you today?",
                "How are things?",
                "Hello! How are you?",
                "You good?",
            ),
        ),
    ),
    WHO: (
        "a question about me",
        (
            *(
                "Who are you?",
                "What are you?",
                "What is your name?",
                "What's your name?",
                "Tell me about yourself.",
                "Your name?",
            ),
            *(
                "Which model are you?",
                "What model are you?",
                "What model is this?",
                "Are you a human?",
                "Are you a robot?",
            ),
            *(
                "Are you an AI?",
                "Introduce yourself.",
                "Who made you?",
                "Who built you?",
                "How were you made?",
                "Who is this?",
            ),
            *(
                "What are you built with?",
                "Are you muse-nano?",
                "Are you Muse Spark?",
                "Hi, who are you?",
                "Hello, who are you?",
            ),
            *(
                "How big are you?",
                "Are you real?",
                "What kind of model are you?",
                "Please introduce yourself.",
                "Are you ChatGPT?",
            ),
            *("Who am I talking to?", "Can you introduce yourself?", "Tell me who you are.", "What should I call you?"),
        ),
    ),
    CAN: (
        "a question about me",
        (
            *(
                "What can you do?",
                "What do you do?",
                "What do you know?",
                "How can you help me?",
                "What are you good at?",
                "Help",
            ),
            *(
                "What can I ask you?",
                "Help!",
                "What are your skills?",
                "What can you help me with?",
                "Tell me what you can do.",
            ),
            *("Hi, what can you do?", "What are your abilities?", "Show me what you can do.", "What else can you do?"),
            *("What are you able to do?", "Hello, what can you do?", "How do you work?", "What can I do with you?"),
        ),
    ),
    "You are welcome!": (
        "thanks",
        (
            *(
                "Thanks!",
                "Thanks",
                "Thank you!",
                "Thank you",
                "Thank you very much!",
                "Thanks a lot!",
                "Many thanks!",
                "Thx",
            ),
            *(
                "Great, thanks!",
                "Okay, thank you.",
                "Thanks, that helps.",
                "Perfect, thank you!",
                "Cheers!",
                "Cool, thanks",
            ),
            *(
                "Good job!",
                "Well done!",
                "Great!",
                "Nice!",
                "Perfect!",
                "Good bot",
                "Awesome!",
                "That is right!",
                "Correct!",
            ),
        ),
    ),
    "Goodbye!": (
        "a farewell",
        (
            *(
                "Bye!",
                "Bye",
                "Goodbye!",
                "Goodbye",
                "Bye bye!",
                "See you!",
                "See you later!",
                "Good night!",
                "Good night",
                "Farewell!",
            ),
            *(
                "Thanks, bye!",
                "Okay, bye.",
                "I have to go.",
                "See you tomorrow!",
                "Take care!",
                "Have a nice day!",
                "Ciao!",
            ),
        ),
    ),
    "Okay. How can I help you?": (
        "a short remark",
        ("Okay.", "OK", "Ok", "Yes", "No", "Sure", "Hmm", "I see.", "Alright.", "Fine."),
    ),
}
KINDS = tuple((answer, kind, ask) for answer, (kind, asks) in SMALL_TALK.items() for ask in asks)
TALK_ANSWERS = tuple(SMALL_TALK)

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
    *("Recommend a book.", "What is time?", "Who is the president of {c}?", "What is in {c}?", "{n}", "{f}?", "{f}"),
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


def small_talk(rng: Random, memory: Memory) -> Turn:
    """A greeting, a question about itself, thanks or a farewell: each kind equally often."""
    if rng.random() < 0.12:
        return introduced(rng, memory)
    answer = rng.choice(TALK_ANSWERS)
    kind, asks = SMALL_TALK[answer]
    return Turn(
        "greeting", casing(rng, rng.choice(asks)), f"This is {kind}.", f"This is {kind}. I answer politely.", answer
    )


def introduced(rng: Random, memory: Memory) -> Turn:
    """The user's name, to be used now and remembered."""
    memory.name = person(rng)
    asks = (
        "My name is {p}.",
        "Hi, I am {p}.",
        "Hello, my name is {p}.",
        "I'm {p}.",
        "I am {p}.",
        "Hi! My name is {p}.",
        "Call me {p}.",
    )
    user = rng.choice(asks).format(p=memory.name)
    reason = f"The name is {memory.name}."
    return Turn("memory", user, reason, f"The user gives a name. {reason}", f"Nice to meet you, {memory.name}!")


def name_asked(rng: Random, memory: Memory) -> Turn:
    """The name given earlier, or that there was none."""
    user = casing(
        rng, rng.choice(("What is my name?", "What's my name?", "Do you know my name?", "Who am I?", "Say my name."))
    )
    if memory.name is None:
        return Turn(
            "memory", user, "No name was given.", "No name was given. I say so.", "You have not told me your name."
        )
    reason = f"The name is {memory.name}."
    return Turn("memory", user, reason, f"The user gave a name. {reason}", f"Your name is {memory.name}.")


def remembered(rng: Random, memory: Memory) -> Turn:
    """A code or word to keep."""
    memory.kept = rng.choice((scramble(rng, 3, 6), str(rng.randint(10, 99999)), invented(rng), rng.choice(NOUNS)))
    asks = (
        "Remember the code {x}.",
        "Remember this: {x}",
        "Please remember {x}.",
        "Remember the word {x}.",
        "Keep in mind: {x}",
    )
    user = rng.choice(asks).format(x=memory.kept)
    return Turn("memory", user, "I keep it.", f"I keep {memory.kept}.", f"I will remember {memory.kept}.")


def kept_asked(rng: Random, memory: Memory) -> Turn:
    """The code or word kept earlier."""
    if memory.kept is None:
        return remembered(rng, memory)
    asks = (
        "What was the code?",
        "What should you remember?",
        "What did I ask you to remember?",
        "What was it?",
        "What was the word?",
    )
    reason = f"It was {memory.kept}."
    return Turn("memory", casing(rng, rng.choice(asks)), reason, f"I kept it. {reason}", reason)


def repeat(rng: Random, memory: Memory) -> Turn:
    """A phrase to be said again, letter by letter the same."""
    del memory
    said = phrase(rng, rng.choice((1, 3, 6, 12)))
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


def date_asked(date: str | None, rng: Random) -> Turn:
    """Today's date, if the system message has it."""
    asks = (
        "What is the date today?",
        "What is today's date?",
        "What day is it?",
        "What date is it?",
        "Which day is today?",
    )
    user = casing(rng, rng.choice(asks))
    if date is None:
        return Turn("memory", user, "No date was given.", "No date was given. I say so.", "I do not know the date.")
    return Turn("memory", user, f"The date is {date}.", f"The date was given. It is {date}.", f"Today is {date}.")
