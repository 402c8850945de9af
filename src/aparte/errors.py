"""Errors that reach a user: sentences with a cause and a next step.

Every error of the product is an :class:`AparteError`. The command line turns them into one line on
standard error and an exit code; nothing else of them is shown, so the message must stand by itself.
Messages never contain text, token ids or activations.
"""

from __future__ import annotations


class AparteError(Exception):
    """Something went wrong that is not the user's mistake (exit code 1)."""

    exit_code = 1


class UserError(AparteError):
    """The user asked for something that cannot be done as asked (exit code 2)."""

    exit_code = 2


class CheckpointError(UserError):
    """A model is unknown, incomplete, damaged or of a kind that is not supported."""


class CutError(UserError):
    """A cut ``(k, m)`` does not fit the model, or differs from the other side's."""


class MismatchError(UserError):
    """The two sides do not run the same model, cut or protocol version."""


class DoorError(UserError):
    """The cloud refused the token, or its certificate could not be checked."""


class FrameError(AparteError):
    """A message broke the wire protocol (bad header, wrong size, unknown kind)."""


class SlotError(AparteError):
    """A step names slots that the stage does not hold, or that contradict each other."""


class LinkError(AparteError):
    """The cloud cannot be reached, or went away. Everything generated so far is still valid."""

    #: How many seconds the cloud asks to be left alone.
    retry_after_s = 0.0


class SilenceError(LinkError):
    """The cloud is there and does not answer. Asking it again would take as long once more."""

    #: Whether there is another cloud to ask.
    elsewhere = False

    def __init__(self, where: str, seconds: float, what: str = "") -> None:
        """``what`` was not answered by the cloud ``where`` for so many ``seconds``."""
        self._where = where
        self._seconds = seconds
        super().__init__(
            f"{where} did not answer{f' {what}' if what else ''} within {seconds:g} s. "
            "Is the machine overloaded, or the network down?"
        )

    def about(self, what: str) -> SilenceError:
        """The same with a name for what was not answered."""
        error = SilenceError(self._where, self._seconds, what)
        error.elsewhere = self.elsewhere
        return error


class GivenUpError(LinkError):
    """It was tried again and again, or until the answer's time was over."""


class WireOverflowError(AparteError):
    """An activation does not fit the wire's number format."""
