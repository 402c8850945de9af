"""A dozen varied prompts for ``verify`` and the tests. Written for this project."""

from __future__ import annotations

import hashlib
import json

PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number, and explain how it works.",
    "Why is the sky blue?",
    "Summarise in one sentence: The committee met on Monday, discussed the budget for two hours, found no "
    "agreement, and decided to meet again on Thursday with figures from all departments.",
    "Translate to German: The train to Hamburg leaves at half past seven.",
    "List the planets of the solar system, one per line, with their number of moons.",
    "A farmer has 17 sheep. All but 9 run away. How many are left? Think step by step.",
    "Write a short poem about a lighthouse in winter.",
    "Repeat exactly: alpha beta gamma alpha beta gamma alpha beta gamma.",
    "Write an SQL query that lists customers with more than three orders in 2023.",
    "Explain to a ten-year-old what a black hole is.",
    'Complete this JSON: {"name": "Ada", "born": 1815, "fields": [',
    "What should a first-aid kit for a hiking trip contain?",
)


def digest(texts: object) -> str:
    """A hash of prompts, so that two reports can be told to be of the same ones."""
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]
