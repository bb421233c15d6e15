"""The workers of a Ray cluster: sends them jobs, handles their messages, and restarts jobs whose worker is lost."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mooring.errors import MooringError
from mooring_lab.engines import worker
from mooring_lab.engines.checkpoint_index import CheckpointIndex
from mooring_lab.engines.runner import KeepResults, Reporter
from mooring_lab.engines.signals import StopRequest
from mooring_lab.fleet.grouping import split_evenly
from mooring_lab.model.plurals import pluralize
from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec

POLL_SECONDS = 0.05

LOSSES_BEFORE_SPLIT = 2
"""After so many losses of a worker at the same step its runs continue in halves: the system may have killed the worker
for the memory it took."""

MAX_LOSSES = 5
"""How often the worker of one run may be lost at the same step before the study gives up."""

CLUSTER_CHECK_SECONDS = 1.0

CLUSTER_TIMEOUT_SECONDS = 15.0
"""How long the cluster's head may be unreachable before it is taken to be gone. Ray ends the process after 60."""


@dataclass
class _ActiveJob:
    """Runs that are with a worker, or wait for one.

    Attributes:
        number: the number of their fleet.
        specs: those that have no result yet.
        steps: how many steps they had taken at their checkpoint.
        losses: how often their worker was lost at that step.
        started: whether a worker has them.
        done: how many run-steps they have taken.
        closed: whether the worker has reported why it ends without results.
    """

    number: int
    specs: list[RunSpec]
    steps: int = 0
    losses: int = 0
    started: bool = False
    done: int = 0
    closed: bool = False


class WorkerPool:
    """The workers that train the fleets of one study, at the same time.

    Args:
        ray: the library.
        start_job: starts a job for these runs and returns Ray's generator of its messages.
        stop_all: asks all workers to stop.
        keep: stores results.
        index: the checkpoints of the study.
        reporter: the receiver of progress.
        stop: whether to stop.
        is_reachable: returns whether the cluster's head answers.
    """

    def __init__(
        self,
        ray: Any,
        start_job: Callable[[Sequence[RunSpec]], Any],
        stop_all: Callable[[], None],
        keep: KeepResults,
        index: CheckpointIndex,
        reporter: Reporter,
        stop: StopRequest,
        is_reachable: Callable[[], bool],
    ) -> None:
        self.ray, self.start_job, self.stop_all, self.keep = ray, start_job, stop_all, keep
        self.index, self.reporter, self.stop, self.is_reachable = index, reporter, stop, is_reachable
        self.jobs: dict[Any, _ActiveJob] = {}
        self.notes: set[str] = set()
        self.error: BaseException | None = None
        self.stopping = False
        self.checked_at = self.reached_at = time.monotonic()

    def run(self, fleets: Sequence[Sequence[RunSpec]], steps: Sequence[int]) -> None:
        """Train every fleet to its end; those with most work start first.

        Args:
            fleets: the runs of each fleet.
            steps: how many steps each run of a fleet takes.

        Raises:
            InterruptedStudyError: somebody asked to stop, and everything is saved.
        """
        self.fleets, self.steps = fleets, steps
        self.results: list[list[Result]] = [[] for _ in fleets]
        for number in sorted(range(len(fleets)), key=lambda number: -len(fleets[number]) * steps[number]):
            self._start(_ActiveJob(number, list(fleets[number])))
        while self.jobs:
            self._check_cluster()
            if self.stop.asked or self.error:
                self._stop()
            ready, _ = self.ray.wait(list(self.jobs), num_returns=len(self.jobs), timeout=POLL_SECONDS)
            for messages in ready:
                try:
                    self._receive(messages)
                except Exception as error:  # such as a full disk: let the other fleets save first
                    self.error = self.error or error
                    self._cancel(messages)
        if self.error:
            raise self.error
        if self.stop.asked:
            raise self.stop.error()

    def _check_cluster(self) -> None:
        """Raise an error if the cluster is gone: a signal to all processes of a job or machine ends its head too."""
        now = time.monotonic()
        if now - self.checked_at < CLUSTER_CHECK_SECONDS:
            return
        self.checked_at = now
        if self.is_reachable():
            self.reached_at = now
        elif now - self.reached_at >= CLUSTER_TIMEOUT_SECONDS:
            gone = MooringError("the Ray cluster is gone: the same command continues from the last checkpoints")
            raise self.stop.error() if self.stop.asked else self.error or gone

    def _start(self, job: _ActiveJob) -> None:
        job.steps = self._saved_steps(job.specs)
        job.started, job.done, job.closed = False, len(job.specs) * job.steps, False
        self.jobs[self.start_job(job.specs)] = job

    def _saved_steps(self, specs: Sequence[RunSpec]) -> int:
        """Return how many steps these runs have taken at their checkpoint."""
        return max((entry.steps for entry in self.index.covering(specs)), default=0)

    def _stop(self) -> None:
        """Ask workers to save and stop, and cancel the jobs that wait for one; only once."""
        if self.stopping:
            return
        self.stopping = True
        self.stop_all()
        for messages in [messages for messages, job in self.jobs.items() if not job.started]:
            self._cancel(messages)

    def _cancel(self, messages: Any) -> None:
        self.jobs.pop(messages, None)
        self.ray.cancel(messages)

    def _receive(self, messages: Any) -> None:
        """Handle the next message of a job, or the loss of its worker."""
        job, errors = self.jobs.pop(messages), self.ray.exceptions
        try:
            message = self.ray.get(next(messages))
        except StopIteration:
            if not job.closed:
                self._restart(job, "a worker ended without a word")
        except errors.OutOfMemoryError:
            self._restart(job, "a worker was out of memory", split=True)
        except errors.WorkerCrashedError:
            self._restart(job, "a worker was lost")
        except (errors.NodeDiedError, errors.ObjectLostError):
            self._restart(job, "a machine was lost", blame_runs=False)
        else:
            self.jobs[messages], job.started = job, True
            self._handle(job, message)

    def _handle(self, job: _ActiveJob, message: worker.Message) -> None:
        if isinstance(message, worker.Advanced):
            job.done = message.done
            self.reporter.advanced(job.number, message.progress, self._done(job.number))
        elif isinstance(message, worker.Noted):
            if message.line not in self.notes:  # several workers may send the same
                self.notes.add(message.line)
                self.reporter.note(message.line)
        elif isinstance(message, worker.Finished):
            self._keep(job, message)
        elif isinstance(message, worker.Failed):
            job.closed = True
            raise MooringError(message.line)
        elif isinstance(message, worker.Stopped):
            job.closed = True

    def _keep(self, job: _ActiveJob, message: worker.Finished) -> None:
        wanted = {spec.key for spec in job.specs}
        results = [result for result in message.results if result.spec.key in wanted]
        self.keep(results)
        (self.index.folder / message.checkpoint).unlink(missing_ok=True)
        kept = {result.spec.key for result in results}
        job.specs = [spec for spec in job.specs if spec.key not in kept]
        job.done = max(0, job.done - len(results) * self.steps[job.number])
        self.results[job.number] += results
        if len(self.results[job.number]) == len(self.fleets[job.number]):
            self.reporter.finished(job.number, self.results[job.number])

    def _done(self, number: int) -> int:
        """Return how many run-steps of a fleet are done, in all its parts."""
        active = sum(job.done for job in self.jobs.values() if job.number == number)
        return len(self.results[number]) * self.steps[number] + active

    def _restart(self, job: _ActiveJob, reason: str, *, blame_runs: bool = True, split: bool = False) -> None:
        """Continue the runs of a lost worker from their checkpoint, in halves if `split` or if that may help.

        `blame_runs` says whether the runs may be the cause, by the memory they take.
        """
        if not job.specs or self.stopping:
            return
        steps = self._saved_steps(job.specs)
        job.losses = (job.losses if steps == job.steps else 0) + blame_runs
        runs = pluralize(len(job.specs), "run")
        split = split or (blame_runs and job.losses % LOSSES_BEFORE_SPLIT == 0)
        if split and len(job.specs) > 1 and not self.index.deterministic:
            parts = split_evenly(job.specs, (len(job.specs) + 1) // 2)
            self.index.split(parts)
            self.reporter.note(f"{reason}: its {runs} go on in halves, from step {steps}")
            for part in parts:
                self._start(_ActiveJob(job.number, part))
            return
        if job.losses >= MAX_LOSSES:
            spec, fewer = job.specs[0], " or --fleet" if len(job.specs) > 1 else ""
            raise MooringError(
                f"{reason}, {job.losses} times after step {steps} of {spec.method} with seed {spec.seed}: it may need "
                f"more memory than a machine has; give a smaller batch{fewer}, or look at the logs in "
                "/tmp/ray/session_latest/logs"
            )
        self.reporter.note(f"{reason}: its {runs} go on from step {steps}")
        self._start(job)
