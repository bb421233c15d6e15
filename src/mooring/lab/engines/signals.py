"""Stopping politely: a first Ctrl-C or SIGTERM asks, and what runs comes to where it can continue from."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from mooring.errors import MooringError

__all__ = ["InterruptedStudyError", "Stop", "stoppable"]

SAVED = "interrupted; everything so far is saved, and the same command continues from here"


class InterruptedStudyError(MooringError):
    """Stopped by Ctrl-C or a signal; everything up to here is saved.

    Args:
        told: one line.
        status: what a command exits with: 130 after Ctrl-C, and 0 after SIGTERM, which asks for no more than this.

    Example:
        >>> InterruptedStudyError().status, InterruptedStudyError(status=0).status
        (130, 0)
    """

    def __init__(self, told: str = SAVED, status: int = 130) -> None:
        super().__init__(told)
        self.status = status


class Stop:
    """Whether something is to stop, and who asked.

    Example:
        >>> stop = Stop()
        >>> stop.ask(signal.SIGTERM)
        >>> stop.asked, stop.error().status
        (True, 0)
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self.number: int = signal.SIGINT

    @property
    def asked(self) -> bool:
        """Whether it is to stop."""
        return self._event.is_set()

    def ask(self, number: int = signal.SIGINT) -> None:
        """Ask it to, on behalf of a signal."""
        self.number = number
        self._event.set()

    def error(self) -> InterruptedStudyError:
        """What to raise once everything is saved."""
        return InterruptedStudyError(status=0 if self.number == signal.SIGTERM else 130)


@contextmanager
def stoppable() -> Iterator[Stop]:
    """While this lasts, a first Ctrl-C or SIGTERM asks politely, and a second one does what it always does."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, frame: FrameType | None) -> None:
        stop.ask(number)
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in before:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
