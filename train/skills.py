"""The tools that synthetic users declare: their names, what they take, how one asks for them, what they reply."""

# ruff: noqa: RUF001, RUF003 (the signs × and − are meant)

from dataclasses import dataclass

from train.arguments import Param


@dataclass(frozen=True)
class Skill:
    """A family of tools. {0}, {1} in a request or answer are the arguments, {r} is the result."""

    names: tuple[str, ...]
    abouts: tuple[str, ...]
    params: tuple[Param, ...]
    asks: tuple[str, ...]
    results: tuple[str, ...]
    answer: str = "The result is {r}."
    topic: str = ""  # "+", "×", "search": what is not asked for otherwise while this tool is declared


TEXT_RESULTS = ("{w}", "{w} {v}", "{n}", "ok", "done", '{{"status": "ok"}}', '{{"result": "{w}"}}', '{{"value": {n}}}')

UNIT = Param(("unit", "units", "scale"), "unit", "Unit of temperature", " in {v}")
LIMIT = Param(("limit", "count", "max_results", "n"), "count", "How many results", ", at most {v}")
CITY = Param(("city", "location", "place", "town"), "city", "Name of the city")
A = Param(("a", "x", "first", "left"), "number", "First number")
B = Param(("b", "y", "second", "right"), "number", "Second number")
QUERY = Param(("query", "q", "text", "terms"), "topic", "What to search for")
MINUTES = Param(("minutes", "duration", "time", "length"), "count", "How long, in minutes")
PERSON = Param(("to", "recipient", "name", "person", "contact"), "person", "Who it is for")
BODY = Param(("text", "message", "body", "content"), "phrase", "What to write")

SKILLS = (
    Skill(
        (
            "get_weather",
            "weather",
            "get_current_weather",
            "fetch_weather",
            "weather_lookup",
            "getWeather",
            "check_weather",
        ),
        (
            "Get the weather for a city.",
            "Get the current weather in a location.",
            "Current weather of a city",
            "Returns the weather.",
        ),
        (CITY, UNIT),
        (
            *(
                "What is the weather in {0}?",
                "What's the weather in {0}?",
                "What is the weather like in {0}?",
                "Weather in {0}?",
                "Will it rain in {0} tomorrow?",
                "How hot is it in {0}?",
                "Do I need an umbrella in {0}?",
            ),
            *(
                "How is the weather in {0}?",
                "What's the weather like in {0} today?",
                "Tell me the weather in {0}.",
                "Is it raining in {0}?",
            ),
            *(
                "Get the weather for {0}.",
                "weather {0}",
                "Check the weather in {0}.",
                "Is it warm in {0}?",
                "Weather for {0}, please.",
            ),
            *("Can you tell me the weather in {0}?", "How warm is it in {0}?", "What is the temperature in {0}?"),
        ),
        (
            *(
                "{s}",
                "{s}, {n} degrees",
                "{n} degrees and {s}",
                "{n} C, {s}",
                '{{"temperature": {n}, "condition": "{s}"}}',
                "{n}",
            ),
            *(
                '{{"temp": {n}, "sky": "{s}"}}',
                '{{"weather": "{s}"}}',
                '{{"city": "{0}", "temperature": {n}}}',
                '{{"temp_c": {n}}}',
            ),
        ),
        "The weather in {0}: {r}.",
    ),
    Skill(
        ("get_time", "current_time", "clock", "time_in", "get_current_time"),
        ("Get the time in a city.", "Current time of a place", "Tells the local time."),
        (CITY,),
        (
            "What time is it in {0}?",
            "What is the time in {0}?",
            "Tell me the time in {0}.",
            "Time in {0}?",
            "Current time in {0}, please.",
        ),
        ("{h}:{m}", '{{"time": "{h}:{m}"}}', "{h}:{m} o'clock"),
        "The time in {0}: {r}.",
    ),
    Skill(
        ("get_time", "now", "clock", "current_time", "time"),
        ("Get the current time.", "Tells the time.", "Current time"),
        (),
        (
            "What time is it?",
            "What is the time?",
            "Tell me the time.",
            "What time is it now?",
            "Can you tell me the time?",
            "Time?",
        ),
        ("{h}:{m}", '{{"time": "{h}:{m}"}}'),
        "The time is {r}.",
    ),
    Skill(
        ("add", "sum", "plus", "add_numbers", "calculator_add"),
        ("Add two numbers.", "Adds a and b.", "Sum of two numbers", "Add two integers"),
        (A, B),
        (
            *(
                "What is {0} + {1}?",
                "What is {0} plus {1}?",
                "Add {0} and {1}.",
                "{0} + {1}",
                "What's {0} + {1}?",
                "Calculate {0} + {1}.",
            ),
            *(
                "Use the tool to add {0} and {1}.",
                "How much is {0} plus {1}?",
                "Please add {0} and {1}.",
                "Compute {0}+{1}.",
            ),
        ),
        ("{n}", "{n}", '{{"result": {n}}}', '{{"sum": {n}}}'),
        "{0} + {1} = {r}.",
        "+",
    ),
    Skill(
        ("multiply", "times", "product", "mul", "multiply_numbers"),
        ("Multiply two numbers.", "Product of two numbers", "Multiplies a by b."),
        (A, B),
        (
            *(
                "What is {0} * {1}?",
                "What is {0} times {1}?",
                "Multiply {0} by {1}.",
                "{0} x {1}",
                "{0} × {1}",
                "Multiply {0} and {1}.",
            ),
            *("Use the tool to multiply {0} and {1}.", "How much is {0} times {1}?", "Calculate {0} * {1}."),
        ),
        ("{n}", "{n}", '{{"result": {n}}}', '{{"product": {n}}}'),
        "{0} × {1} = {r}.",
        "×",
    ),
    Skill(
        ("search", "web_search", "find", "lookup", "search_web", "google"),
        ("Search the web.", "Finds pages about a query.", "Look something up", "Search for information."),
        (QUERY, LIMIT),
        (
            *(
                "Search for {0}.",
                "Search the web for {0}.",
                "Look up {0}.",
                "Find {0}.",
                "Please search for {0}.",
                "search {0}",
            ),
            *(
                "Can you search for {0}?",
                "Find information about {0}.",
                "Search: {0}",
                "Google {0}.",
                "Can you look up {0}?",
            ),
        ),
        ("{w} {v}", '{{"results": ["{w} {v}"]}}', "{n} pages", "no results", '{{"title": "{w} {v}"}}', "{w}: {v}"),
        "I found: {r}.",
        "search",
    ),
    Skill(
        ("set_timer", "timer", "start_timer", "countdown", "create_timer"),
        ("Set a timer.", "Starts a timer for some minutes.", "Timer in minutes"),
        (MINUTES,),
        (
            *(
                "Set a timer for {0} minutes.",
                "Start a timer for {0} minutes.",
                "Timer for {0} minutes, please.",
                "{0} minute timer",
            ),
            *("Can you set a timer for {0} minutes?", "Set a {0} minute timer.", "Please start a {0} minute timer."),
        ),
        ("ok", "done", "started", "timer set", '{{"status": "ok"}}', '{{"ok": true}}', '{{"status": "started"}}'),
        "The timer for {0} minutes: {r}.",
    ),
    Skill(
        ("send_message", "message", "send_email", "email", "text_message", "send_sms"),
        ("Send a message to a person.", "Sends an email.", "Write to someone"),
        (PERSON, BODY),
        (
            *(
                'Send "{1}" to {0}.',
                "Send a message to {0}: {1}",
                "Tell {0}: {1}",
                "Write to {0}: {1}",
                'Send {0} the message "{1}".',
            ),
            *('Message {0}: "{1}"', "Send an email to {0} saying: {1}"),
        ),
        ("sent", "ok", "delivered", '{{"status": "sent"}}', '{{"ok": true}}', '{{"id": {n}}}'),
        "The message to {0}: {r}.",
    ),
    Skill(
        ("translate", "translate_text", "translation", "to_language"),
        ("Translate a text.", "Translates text into a language."),
        (
            Param(("text", "phrase", "source", "input"), "phrase", "Text"),
            Param(("language", "lang", "target", "to"), "language", "Language"),
        ),
        (
            *(
                'Translate "{0}" into {1}.',
                'Translate "{0}" to {1}.',
                'How do you say "{0}" in {1}?',
                'What is "{0}" in {1}?',
            ),
            *("Translate {0} into {1}.", "Translate {0} to {1}.", "Please translate {0} into {1}."),
        ),
        ("{v}", "{w} {v}", '{{"text": "{w} {v}"}}', '{{"translation": "{v}"}}'),
        "In {1}: {r}.",
        "search",
    ),
    Skill(
        ("turn_on", "switch_on", "activate", "enable_device", "start_device"),
        ("Turn on a device.", "Switches a device on."),
        (Param(("device", "name", "target", "id"), "device", "Which device"),),
        (
            "Turn on the {0}.",
            "Switch on the {0}.",
            "Please turn the {0} on.",
            "Can you turn on the {0}?",
            "Turn the {0} on.",
        ),
        ("on", "ok", "done", '{{"state": "on"}}', '{{"status": "on"}}'),
        "The {0}: {r}.",
    ),
    Skill(
        ("define", "dictionary", "get_definition", "lookup_word", "meaning"),
        ("Define a word.", "Looks a word up in the dictionary.", "Meaning of a word"),
        (Param(("word", "term", "entry"), "word", "The word"),),
        (
            "Define {0}.",
            "What does {0} mean?",
            "Look up the word {0}.",
            "What is the meaning of {0}?",
            'Define the word "{0}".',
        ),
        ("a {w}", "a kind of {w}", '{{"meaning": "a {w} {v}"}}', "{w} {v}"),
        "{0}: {r}.",
        "search",
    ),
    Skill(
        ("roll_dice", "roll", "random_number", "dice", "roll_die"),
        ("Roll a die.", "Gives a random number.", "Rolls the dice."),
        (),
        (
            "Roll a die.",
            "Roll the dice.",
            "Roll.",
            "Can you roll a die?",
            "Give me a random number.",
            "Please roll the dice.",
        ),
        ("{n}", '{{"value": {n}}}', '{{"roll": {n}}}'),
    ),
    Skill(
        ("play_music", "play", "play_song", "start_song", "music"),
        ("Play a song.", "Starts music.", "Plays a song by title."),
        (Param(("song", "title", "track", "name"), "phrase", "Title"),),
        ('Play "{0}".', "Play the song {0}.", "Play {0}.", "Please play {0}.", "Put on {0}.", "I want to hear {0}."),
        ("playing", "ok", '{{"status": "playing"}}', '{{"playing": "{w}"}}'),
        "The song: {r}.",
    ),
    Skill(
        ("ping", "status", "health", "check_status", "ping_server"),
        ("Check the server.", "Ping the server.", "Status of the server"),
        (),
        (
            "Ping the server.",
            "Ping.",
            "Is the server up?",
            "Check the server.",
            "What is the status of the server?",
            "Check the status.",
        ),
        ("pong", "ok", "up", "down", '{{"status": "ok"}}', '{{"up": true}}'),
    ),
    Skill(
        ("get_stock_price", "stock_price", "get_price", "price_of", "quote"),
        ("Get the price of something.", "Current stock price", "Price of a stock"),
        (Param(("symbol", "ticker", "stock", "item"), "code", "Symbol"),),
        (
            "What is the price of {0}?",
            "Price of {0}?",
            "How much does {0} cost?",
            "What is {0} worth?",
            "Get the price of {0}.",
        ),
        ("{n}", '{{"price": {n}}}', "{n} dollars", '{{"symbol": "{0}", "price": {n}}}'),
        "The price of {0}: {r}.",
    ),
    Skill(
        ("set_alarm", "alarm", "wake_me", "create_alarm", "book_room", "reserve"),
        ("Set an alarm.", "Alarm at a time of day", "Reserves a time."),
        (Param(("time", "at", "when", "hour"), "clock", "Time of day"),),
        ("Set an alarm for {0}.", "Wake me at {0}.", "Set the alarm to {0}.", "Alarm at {0}, please.", "Reserve {0}."),
        ("ok", "set", "done", '{{"status": "set"}}', '{{"ok": true}}'),
        "The time {0}: {r}.",
    ),
)
