"""Prompts of this project's own for running the papers again; written for it, none from a benchmark."""

from __future__ import annotations

from aparte.measure.specbench import Question

#: Two of each of paper A's four kinds of prompts.
CATEGORIES: dict[str, tuple[str, str]] = {
    "code": (
        "Write a Python class for a bank account with deposit, withdraw and a history, and show how to use it.",
        "Write a Python function that merges two sorted lists, with a docstring and three tests.",
    ),
    "structured": (
        "List the twelve months with their number of days as a table with two columns.",
        'Give a JSON list of five animals, each with the fields "name", "class" and "legs".',
    ),
    "creative": (
        "Write a short story about a clockmaker who finds a letter in an old clock.",
        "Write a poem of three stanzas about the first snow in a harbour town.",
    ),
    "conversational": (
        "I slept badly and have a long day ahead. What would you suggest?",
        "What is the difference between a crocodile and an alligator, and which one is more dangerous?",
    ),
}

_ORCHARD = (
    "The orchard behind the school in Brenthill had not been picked for nine years when two teachers asked the "
    "council for the key. In the first autumn forty pupils brought in three hundred kilos of apples, most of "
    "them of a kind that nobody could name. A nursery in the next valley identified it as a Brenthill Russet, "
    "thought to be lost since the sixties, and offered to graft new trees if the school kept the old ones. The "
    "council has now given the orchard to the school for twenty years. Juice from the first pressing is sold at "
    "the market on Saturdays, and the money goes to a new fence against deer."
)
_FERRY = (
    "The night ferry between Aldmouth and the islands will stop running in March. The company says that the ship, "
    "built in 1979, would need new engines to meet the rules that begin next year, and that these cost more than "
    "the line has earned in ten years. Islanders point out that the last day boat leaves at four, so that nobody "
    "who works on the mainland can come home in the evening. The harbour master has proposed a smaller boat that "
    "carries no cars. A meeting with the ministry is planned for the second week of January."
)
_BEES = (
    "Researchers at a field station put tiny numbers on the backs of six hundred bumblebees and watched them with "
    "cameras for a summer. Bees that had once found a blocked flower to be empty came back to it less often, as "
    "expected. But others, which had only seen a nest mate leave that flower without pollen, avoided it too. The "
    "team concludes that bumblebees learn from the failures of others, which had been shown for honeybees only. "
    "They now want to find out whether the insects recognise each other or only the way a bee flies off."
)

#: Questions in the six tasks of Spec-Bench, where that benchmark's file is not given.
QUESTIONS: tuple[Question, ...] = (
    Question("own-1", "summarization", (f"Summarize in two sentences.\n\n{_ORCHARD}",)),
    Question("own-2", "qa", ("Which planet has the most moons, and how many of them are larger than ours?",)),
    Question(
        "own-3",
        "math_reasoning",
        (
            "A baker sells 48 rolls at 35 cents and 22 loaves at 2 euros. How much does he take? Step by step.",
        ),
    ),
    Question(
        "own-4",
        "translation",
        ("Translate to French: The bridge is closed until Monday because of the wind.",),
    ),
    Question(
        "own-5", "rag", (f"Answer from the text.\n\n{_FERRY}\n\nQuestion: Why does the night ferry stop?",)
    ),
    Question("own-6", "writing", ("Write an invitation to a street party for neighbours.",)),
    Question("own-7", "summarization", (f"Summarize in two sentences.\n\n{_FERRY}",)),
    Question("own-8", "summarization", (f"Summarize in two sentences.\n\n{_BEES}",)),
    Question("own-9", "rag", (f"Answer from the text.\n\n{_BEES}\n\nQuestion: What do the bees learn?",)),
    Question("own-10", "coding", ("Write a Python function that counts the words of a text.",)),
    Question(
        "own-11",
        "math_reasoning",
        ("A train leaves at 9:40 and takes 2 hours and 35 minutes. When does it arrive? Step by step.",),
    ),
    Question("own-12", "qa", ("Who wrote Don Quixote, and what is it about?",)),
)

#: A summary of each passage, to score against.
REFERENCES = {
    "own-1": (
        "Pupils and teachers in Brenthill revived a neglected school orchard and found an apple thought to be lost. "
        "The council has given the school the orchard for twenty years, and juice sales pay for a fence."
    ),
    "own-7": (
        "The night ferry to the islands ends in March because new engines would cost more than the line earns. "
        "Islanders would be unable to come home in the evening, and a smaller boat has been proposed."
    ),
    "own-8": (
        "Marked bumblebees avoided an empty flower that they had only seen a nest mate leave without pollen. "
        "Researchers conclude that bumblebees learn from the failures of others."
    ),
}
