"""Fleets under way elsewhere: what they tell, and what becomes of those that are lost."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mooring.errors import MooringError
from mooring.lab.engines import worker as crew
from mooring.lab.engines.checkpoint_index import Unfinished
from mooring.lab.engines.reporting import Reporter
from mooring.lab.engines.signals import Stop
from mooring.lab.fleet.grouping import split_evenly
from mooring.lab.model.plurals import pluralize
from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec

__all__ = ["Dispatch"]

WAIT_SECONDS = 0.05

HALVED = 2
"""So many times a worker is lost at the same place before its runs go on in halves: the system may have killed it for
the memory it took."""

GONE_SECONDS = 15.0
"""So long nobody answers at the cluster's head before it is taken to be gone. Ray itself ends the process after 60."""

GIVEN_UP = 5
"""So many times one run loses its worker at the same place."""


@dataclass
class _Leg:
    """Runs that sail together now.

    Attributes:
        number: of their fleet.
        specs: those that have no result yet.
        steps: how many are behind them on disk.
        lost: how often their worker was lost there.
        begun: whether a worker has them.
        done: run-steps behind them.
        over: whether nothing more is to come, and why that is no loss.
    """

    number: int
    specs: list[RunSpec]
    steps: int = 0
    lost: int = 0
    begun: bool = False
    done: int = 0
    over: bool = False


class Dispatch:
    """Sends fleets out, hears from them, puts away what they bring, and sends out again what was lost.

    Args:
        ray: the library, or who stands in for it on one machine.
        launch: sends runs out; what they tell comes back as Ray's generator.
        halt: asks all of them to stop.
        keep: puts results away.
        unfinished: their checkpoints.
        reporter: who is told.
        stop: whether everything is to stop.
        reached: whether the cluster's head answers.
        hint: where else to look when a run is given up.
    """

    def __init__(
        self,
        ray: Any,
        launch: Callable[[Sequence[RunSpec]], Any],
        halt: Callable[[], None],
        keep: Callable[[list[Result]], None],
        unfinished: Unfinished,
        reporter: Reporter,
        stop: Stop,
        reached: Callable[[], bool] = lambda: True,
        hint: str = "",
    ) -> None:
        self.hint = hint
        self.ray, self.launch, self.halt, self.keep = ray, launch, halt, keep
        self.unfinished, self.reporter, self.stop, self.reached = unfinished, reporter, stop, reached
        self.legs: dict[Any, _Leg] = {}
        self.notes: set[str] = set()
        self.error: BaseException | None = None
        self.halted = False
        self.looked = self.answered = time.monotonic()

    def run(self, fleets: Sequence[Sequence[RunSpec]], steps: Sequence[int]) -> None:
        """Run every fleet to its end, the ones with most work first.

        Args:
            fleets: the runs.
            steps: how many each run of a fleet takes.

        Raises:
            InterruptedStudyError: once everything is saved, where that was asked for.
        """
        self.fleets, self.steps = fleets, steps
        self.results: list[list[Result]] = [[] for _ in fleets]
        for number in sorted(range(len(fleets)), key=lambda n: -len(fleets[n]) * steps[n]):
            self._send(_Leg(number, list(fleets[number])))
        while self.legs:
            self._look()
            if self.stop.asked or self.error:
                self._halt()
            ready, _ = self.ray.wait(list(self.legs), num_returns=len(self.legs), timeout=WAIT_SECONDS)
            for each in ready:
                try:
                    self._hear(each)
                except Exception as error:  # such as a full disk: the others come to a harbour first
                    self.error = self.error or error
                    self._drop(each)
        if self.error:
            raise self.error
        if self.stop.asked:
            raise self.stop.error()

    def _look(self) -> None:
        """Whether the cluster is still there: a signal to every process of a job, or of its machine, ends its head too.

        Raises:
            InterruptedStudyError: where it is gone and everything was to stop.
            MooringError: where it is gone.
        """
        now = time.monotonic()
        if now - self.looked < 1:
            return
        self.looked = now
        if self.reached():
            self.answered = now
        elif now - self.answered >= GONE_SECONDS:
            gone = MooringError("the Ray cluster is gone: the same command continues from the last checkpoints")
            raise self.stop.error() if self.stop.asked else self.error or gone

    def _send(self, leg: _Leg) -> None:
        leg.steps = self._behind(leg.specs)
        leg.begun, leg.done, leg.over = False, len(leg.specs) * leg.steps, False
        self.legs[self.launch(leg.specs)] = leg

    def _behind(self, specs: Sequence[RunSpec]) -> int:
        """Steps that these runs have behind them on disk."""
        return max((saved.steps for saved in self.unfinished.covering(specs)), default=0)

    def _halt(self) -> None:
        """Once: those that sail save and stop, those that wait never begin."""
        if self.halted:
            return
        self.halted = True
        self.halt()
        for each in [each for each, leg in self.legs.items() if not leg.begun]:
            self._drop(each)

    def _drop(self, each: Any) -> None:
        self.legs.pop(each, None)
        self.ray.cancel(each)

    def _hear(self, each: Any) -> None:
        """The next thing that runs tell, or that they are lost."""
        leg, lost = self.legs[each], self.ray.exceptions
        try:
            heard = self.ray.get(next(each))
        except StopIteration:
            del self.legs[each]
            if leg.specs and not leg.over:
                self._again(leg, "a worker ended without a word")
        except (lost.WorkerCrashedError, lost.NodeDiedError, lost.OutOfMemoryError, lost.ObjectLostError) as error:
            del self.legs[each]
            self._again(leg, **_why(lost, error))
        else:
            leg.begun = True
            self._heard(leg, heard)

    def _heard(self, leg: _Leg, heard: crew.Heard) -> None:
        if isinstance(heard, crew.Sailing):
            leg.done = heard.done
            self.reporter.sailing(leg.number, heard.seen, self._done(leg.number))
        elif isinstance(heard, crew.Noted):
            self._note(heard.line)
        elif isinstance(heard, crew.Kept):
            self._keep(leg, heard)
        elif isinstance(heard, crew.Failed):
            leg.over = True
            raise MooringError(heard.line)
        elif isinstance(heard, crew.Stopped):
            leg.over = True

    def _keep(self, leg: _Leg, heard: crew.Kept) -> None:
        mine = {spec.key for spec in leg.specs}
        new = [result for result in heard.results if result.spec.key in mine]
        self.keep(new)
        (self.unfinished.folder / heard.checkpoint).unlink(missing_ok=True)
        kept = {result.spec.key for result in new}
        leg.specs = [spec for spec in leg.specs if spec.key not in kept]
        leg.done = max(0, leg.done - len(new) * self.steps[leg.number])
        self.results[leg.number] += new
        if len(self.results[leg.number]) == len(self.fleets[leg.number]):
            self.reporter.finished(leg.number, self.results[leg.number])

    def _done(self, number: int) -> int:
        """Run-steps that a fleet has behind it, in all its parts."""
        under_way = sum(leg.done for leg in self.legs.values() if leg.number == number)
        return len(self.results[number]) * self.steps[number] + under_way

    def _note(self, line: str) -> None:
        """Once, however many say it."""
        if line not in self.notes:
            self.notes.add(line)
            self.reporter.note(line)

    def _again(self, leg: _Leg, why: str, *, counts: bool = True, memory: bool = False) -> None:
        """Runs whose worker was lost go on from where they were saved, in halves where that may help."""
        if not leg.specs or self.halted:
            return
        behind = self._behind(leg.specs)
        leg.lost = (leg.lost if behind == leg.steps else 0) + counts
        runs = pluralize(len(leg.specs), "run")
        if len(leg.specs) > 1 and not self.unfinished.deterministic and (memory or (counts and leg.lost % HALVED == 0)):
            parts = split_evenly(leg.specs, (len(leg.specs) + 1) // 2)
            self.unfinished.split(parts)
            self.reporter.note(f"{why}: its {runs} go on in halves, from step {behind}")
            for part in parts:
                self._send(_Leg(leg.number, part))
            return
        if leg.lost >= GIVEN_UP:
            spec, fewer = leg.specs[0], " or --fleet" if len(leg.specs) > 1 else ""
            raise MooringError(
                f"{why}, {leg.lost} times after step {behind} of {spec.method} with seed {spec.seed}: it may need more "
                f"memory than a machine has; give a smaller batch{fewer}{self.hint}"
            )
        self.reporter.note(f"{why}: its {runs} go on from step {behind}")
        self._send(leg)


def _why(lost: Any, error: Exception) -> dict[str, Any]:
    """What happened, in words, and what it says about the runs."""
    if isinstance(error, lost.OutOfMemoryError):
        return {"why": "a worker was out of memory", "memory": True}
    if isinstance(error, lost.WorkerCrashedError):
        return {"why": "a worker was lost"}
    return {"why": "a machine was lost", "counts": False}
