"""Stopping on a signal: the first Ctrl-C or SIGTERM asks, so that everything can be saved first."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from mooring.errors import MooringError

SAVED_MESSAGE = "interrupted; everything so far is saved, and the same command continues from here"


class InterruptedStudyError(MooringError):
    """A stop by Ctrl-C or a signal, after everything was saved.

    Args:
        message: one line.
        status: the exit status of a command: 130 after Ctrl-C, and 0 after SIGTERM, because stopping was all it asked.

    Example:
        >>> InterruptedStudyError().status, InterruptedStudyError(status=0).status
        (130, 0)
    """

    def __init__(self, message: str = SAVED_MESSAGE, status: int = 130) -> None:
        super().__init__(message)
        self.status = status


class StopRequest:
    """A flag that says whether to stop, and which signal asked for it.

    Example:
        >>> stop = StopRequest()
        >>> stop.ask(signal.SIGTERM)
        >>> stop.asked, stop.error().status
        (True, 0)
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self.number: int = signal.SIGINT

    @property
    def asked(self) -> bool:
        """Whether somebody asked to stop."""
        return self._event.is_set()

    def ask(self, number: int = signal.SIGINT) -> None:
        """Ask to stop, on behalf of a signal."""
        self.number = number
        self._event.set()

    def error(self) -> InterruptedStudyError:
        """Return the error to raise once everything is saved."""
        return InterruptedStudyError(status=0 if self.number == signal.SIGTERM else 130)


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Turn the first Ctrl-C or SIGTERM into a request to stop; the second one acts as it always does."""
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def ask(number: int, frame: FrameType | None) -> None:
        stop.ask(number)
        restore()

    for number in previous:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        restore()
