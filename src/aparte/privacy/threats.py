"""The four attackers, each in a paragraph that can be read without knowing how models work."""

from __future__ import annotations

from typing import NamedTuple


class Threat(NamedTuple):
    """Who attacks; ``key`` is what an attack's ``threat`` names."""

    key: str
    title: str
    text: str


THREATS = (
    Threat(
        "pairs",
        "A curious cloud without the device's weights",
        "The operator of the rented machine, or somebody with access to it, stores what arrives there and "
        "tries to read it. They do not have the parts of the model that run on the user's device. They can, "
        "however, use the same service with texts of their own, see which numbers arrive for which words, "
        "and train a program on such pairs. They follow the agreed procedure and return correct results, so "
        "the user notices nothing. This is the attacker of the paper whose method this software follows.",
    ),
    Threat(
        "public",
        "A curious cloud that downloaded the public model",
        "As before, but the model's weights are published, as those of every open model are, and the "
        "attacker has downloaded them: also the parts that the user kept at home. They can then repeat every "
        "computation of the user's device on any text and compare. For an open model nothing prevents this, "
        "and nothing shows whether it happened, or will happen to stored data years later. For open models "
        "this is the attacker to plan for.",
    ),
    Threat(
        "tampering",
        "A cloud that also returns tampered results",
        "The attacker not only reads but answers with numbers of its own choice, to make the user's device "
        "write other text, or behave so that it gives away more. The device checks that results have the "
        "right form and size; it cannot check that they are right. Reading works as for the two attackers "
        "above, so their figures hold here too; what a changed answer could do to the user is not measured "
        "in this audit.",
    ),
    Threat(
        "network",
        "A network observer outside the encryption",
        "Somebody on the way between the user and the cloud, for example an internet provider, who sees the "
        "encrypted connection but not what is in it. Sizes, number and times of the messages are not hidden "
        "by encryption. From them the observer tries to tell which of several known questions is being "
        "answered. The cloud's operator sees the same and more.",
    ),
)

BASELINES = Threat(
    "none",
    "Nobody: guessing without looking",
    "What is right by chance, by knowing which words are frequent, or by knowing the language. An attack "
    "says something about the protection only where it does better than this.",
)
