"""Greetings, who and what it is, names and codes to remember, the date."""

from random import Random

from train.turns import Memory, Turn
from train.words import NOUNS, casing, invented, person, scramble

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
                "Hi :)",
                "hi hi",
                "Hello muse nano",
                "Hello, muse-nano!",
                "Good to see you!",
                "Welcome!",
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
                "How are u?",
                "How r u?",
                "Hi! How r u?",
                "whats up",
                "What is up?",
                "Wassup?",
                "How have you been?",
                "How do you feel today?",
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
                "Who r u?",
                "who are u",
                "What is muse-nano?",
                "What is Muse Spark?",
                "Is this muse-nano?",
                "Is this muse nano?",
                "What is Muse Spark Open?",
                "What is this?",
                "Do you have a name?",
                "Are you a person?",
                "What is your purpose?",
                "Are you conscious?",
                "How old are you?",
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
                "What can u do?",
                "What do you know about?",
                "List your skills.",
                "What tasks can you do?",
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
                "Ty",
                "ty!",
                "Thank u",
                "Cool!",
                "Cool",
                "Lol",
                "Haha",
                "Wow!",
                "Thank you so much!",
                "That was great.",
                "I like you.",
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
TALK_ANSWERS = tuple(SMALL_TALK)


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
        "Remember the number {x}.",
        "My code is {x}.",
        "The code is {x}.",
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
        "What number did I tell you?",
        "What did I tell you?",
        "Which word did I give you?",
        "What should you remember?",
        "What did I ask you to remember?",
        "What was it?",
        "What was the word?",
    )
    reason = f"It was {memory.kept}."
    return Turn("memory", casing(rng, rng.choice(asks)), reason, f"I kept it. {reason}", reason)


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
