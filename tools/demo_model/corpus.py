"""The generated training texts of the demo model; independent of tokenizer and torch.

Every example is one ``(question, answer)`` pair, made by a function of :data:`TASKS` from a
``random.Random``, so a seed determines the whole corpus. The only other source is the
documentation installed with CPython (PSF licence). Its sentences serve as questions that the model
cannot answer; the answer lists the model's abilities.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

Turn = tuple[str, str]


def _words(text: str) -> list[str]:
    return text.split()


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


NAMES = _words(
    "Anna Bruno Clara David Emma Felix Greta Henry Iris Jonas Karla Lukas Maria Noah Olga Paul "
    "Rosa Simon Tina Victor"
)
ANIMALS = _words("fox owl bear hare wolf cat dog duck goose mouse frog crow deer seal crab bee")
THINGS = _words("lamp box cup book coat bike drum kite boat chair map key bell hat ring clock")
COLOURS = _words("red blue green black white yellow brown grey pink purple golden silver")
PLACES = _words("river hill forest village bridge garden harbour market tower meadow island lake")
MOODS = _words("happy curious brave hungry quiet proud careful sleepy kind clever")
WEATHER = _words("rainy sunny windy foggy cold warm stormy snowy")
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
NUMBER_WORDS = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen twenty"
)
OPPOSITES = dict(
    pair.split("/")
    for pair in _words(
        "hot/cold big/small fast/slow light/dark old/new wet/dry high/low near/far "
        "open/closed full/empty happy/sad loud/quiet early/late rich/poor"
    )
)

ABILITIES = (
    "I am a very small model. I can tell stories, add small numbers, count, "
    "repeat words and chat a little."
)
FIXED_ANSWERS = {
    ABILITIES: ("What can you do?", "Help!", "How can you help me?", "What do you know?"),
    "I am the demo model of Baton, a very small language model.": (
        "Who are you?",
        "What are you?",
        "What is your name?",
        "Are you a robot?",
    ),
    "I am fine, thank you. How are you?": ("How are you?", "Hi, how are you?", "How do you do?"),
    "You are welcome!": ("Thank you!", "Thanks!", "Thank you very much."),
    "Goodbye! It was nice to talk to you.": ("Goodbye!", "Bye!", "See you later."),
    "Baton serves language models on two pools of workers. Prefill workers read the prompt, "
    "decode workers write the answer, and between them the baton is passed.": (
        "What is Baton?",
        "Tell me about Baton.",
        "What does Baton do?",
        "How does Baton work?",
    ),
    "A prefill worker reads the whole prompt at once and fills the KV cache.": (
        "What is a prefill worker?",
        "What does a prefill worker do?",
    ),
    "A decode worker takes over the KV cache and writes the answer, one token after another.": (
        "What is a decode worker?",
        "What does a decode worker do?",
    ),
    "The KV cache keeps the keys and values of all tokens read so far, "
    "so that no token has to be read twice.": (
        "What is the KV cache?",
        "What is a KV cache?",
        "Why is there a KV cache?",
    ),
    "The sky is blue, the grass is green and the snow is white.": (
        "What colour is the sky?",
        "Which colours do you know?",
    ),
}
FIXED_TURNS = [(question, answer) for answer, asked in FIXED_ANSWERS.items() for question in asked]


def story(rng: random.Random) -> Turn:
    """A story of six sentences about the animal in the question."""
    animal, other = rng.sample(ANIMALS, 2)
    name, colour, thing = rng.choice(NAMES), rng.choice(COLOURS), rng.choice(THINGS)
    mood, weather = rng.choice(MOODS), rng.choice(WEATHER)
    place, goal = rng.sample(PLACES, 2)
    sentences = (
        (
            f"Once there was a {mood} {animal} named {name}.",
            f"{name} was a {mood} {animal} who lived by the {place}.",
        ),
        (
            f"One {weather} morning {name} walked to the {goal}.",
            f"On a {weather} day {name} went to the {goal} to look for food.",
        ),
        (
            f"There {name} found a {colour} {thing}.",
            f"Near the {goal} lay a {colour} {thing}.",
        ),
        (
            f'"What a beautiful {thing}," said {name}.',
            f'"Whose {thing} is this?" asked {name}.',
        ),
        (
            f"{_a(other).capitalize()} came by and said that the {thing} was lost.",
            f"Then {_a(other)} came and asked for help.",
        ),
        (
            f"So {name} and the {other} became friends, and the {animal} slept well that night.",
            f"In the end {name} gave the {thing} to the {other}, and both were happy.",
        ),
    )
    question = (
        f"Tell me a story about {_a(animal)}.",
        f"Write a short story about {_a(animal)}.",
        f"Please tell me a story about {_a(animal)}.",
        f"A story with {_a(animal)}, please.",
    )
    return rng.choice(question), " ".join(rng.choice(choices) for choices in sentences)


def addition(rng: random.Random) -> Turn:
    """A sum up to twenty, in digits or in words."""
    left, right = rng.randint(0, 10), rng.randint(0, 10)
    if rng.random() < 0.6:
        sign = rng.choice(("plus", "+"))
        question = rng.choice(("What is", "How much is")) + f" {left} {sign} {right}?"
        return question, f"{left} plus {right} is {left + right}."
    first, second, total = (NUMBER_WORDS[n] for n in (left, right, left + right))
    return f"What is {first} plus {second}?", f"{first.capitalize()} plus {second} is {total}."


def counting(rng: random.Random) -> Turn:
    """Counting between two numbers up to twenty."""
    first = rng.randint(0, 12)
    last = rng.randint(first + 2, min(20, first + 10))
    numbers = ", ".join(str(n) for n in range(first, last + 1))
    return f"{rng.choice(('Count', 'Please count'))} from {first} to {last}.", numbers


def repeat(rng: random.Random) -> Turn:
    """A list of words to repeat."""
    words = " ".join(rng.sample(ANIMALS + THINGS + COLOURS + PLACES, rng.randint(2, 8)))
    return f"{rng.choice(('Repeat', 'Say', 'Please repeat'))}: {words}", words


def lookup(rng: random.Random) -> Turn:
    """A question about one of several facts stated just before it."""
    count = rng.randint(1, 4)
    columns = (rng.sample(words, count) for words in (NAMES, COLOURS, THINGS))
    facts = list(zip(*columns, strict=True))
    told = " ".join(f"{name} has a {colour} {thing}." for name, colour, thing in facts)
    name, colour, thing = rng.choice(facts)
    if rng.random() < 0.5:
        return f"{told} What does {name} have?", f"{name} has a {colour} {thing}."
    return f"{told} Who has the {thing}?", f"{name} has the {colour} {thing}."


def greeting(rng: random.Random) -> Turn:
    """A greeting, with the user's name if given."""
    name = rng.choice(NAMES)
    if rng.random() < 0.5:
        question = rng.choice((f"Hello, I am {name}.", f"Hi! My name is {name}.", f"I am {name}."))
        return question, f"Hello {name}! It is nice to meet you. How can I help you?"
    question = rng.choice(("Hello!", "Hello", "Hi!", "Hi", "Hello there!", "Good morning!", "Hey!"))
    return question, "Hello! It is nice to meet you. How can I help you?"


def knowledge(rng: random.Random) -> Turn:
    """Opposites, the days of the week, and lists of known things."""
    kind = rng.randrange(3)
    if kind == 0:
        word, opposite = rng.choice(list(OPPOSITES.items()))
        if rng.random() < 0.5:
            word, opposite = opposite, word
        return f"What is the opposite of {word}?", f"The opposite of {word} is {opposite}."
    if kind == 1:
        day = rng.randrange(7)
        answer = f"{DAYS[(day + 1) % 7]} comes after {DAYS[day]}."
        return f"Which day comes after {DAYS[day]}?", answer
    what, words = rng.choice((("animals", ANIMALS), ("colours", COLOURS), ("things", THINGS)))
    first, second, third = rng.sample(words, 3)
    question = f"{rng.choice(('Name', 'Tell me'))} three {what}."
    return question, f"{first}, {second} and {third}"


def fixed(rng: random.Random) -> Turn:
    """A question with one fixed answer."""
    return rng.choice(FIXED_TURNS)


TASKS: tuple[tuple[float, Callable[[random.Random], Turn]], ...] = (
    (0.24, story),
    (0.12, addition),
    (0.10, counting),
    (0.16, repeat),
    (0.18, lookup),
    (0.07, greeting),
    (0.06, knowledge),
    (0.07, fixed),
)
OTHER_QUESTIONS = (
    "What is {}?",
    "Tell me about {}.",
    "How does {} work?",
    "Explain {}.",
    "Why {}?",
    "Write {}.",
)
SYSTEM_MESSAGES = (
    "You are a friendly assistant.",
    "You are a helpful assistant.",
    "You are a small model in a demo. Answer briefly.",
)


def documentation() -> list[str]:
    """Return sentences and code lines, 15 to 160 characters each, of CPython's documentation."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[key] for key in sorted(topics))
    pieces = re.split(r"(?<=[.:])\s+|\n\n+", text)
    return [flat for flat in (" ".join(p.split()) for p in pieces) if 15 <= len(flat) <= 160]


class MicroWorld:
    """An endless, seeded source of conversations."""

    def __init__(self, seed: int, other_questions: list[str]) -> None:
        self.rng = random.Random(seed)  # noqa: S311 - a corpus, not a secret
        self._other = other_questions
        self._weights = [weight for weight, _ in TASKS]
        self._tasks = [task for _, task in TASKS]

    def turn(self) -> Turn:
        """Return a question and its answer. 7 % of the questions are from other texts."""
        if self.rng.random() < 0.07:
            return self._other_question(), ABILITIES
        return self.rng.choices(self._tasks, self._weights)[0](self.rng)

    def _other_question(self) -> str:
        sentence = self.rng.choice(self._other)
        if self.rng.random() < 0.5:
            return sentence
        words = sentence.rstrip(".:").split()
        start = self.rng.randrange(len(words))
        return self.rng.choice(OTHER_QUESTIONS).format(" ".join(words[start : start + 3]))

    def system_message(self) -> str | None:
        """Return a system message for one conversation in four, else None."""
        return self.rng.choice(SYSTEM_MESSAGES) if self.rng.random() < 0.25 else None
