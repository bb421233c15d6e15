"""The source of all runs of a reproduction: one study, the data sets, and the backbones to start from."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TypeVar

from mooring.errors import MooringError
from mooring_lab.methods import find_method
from mooring_lab.model.plurals import pluralize
from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec
from mooring_lab.model.training import Training
from mooring_lab.networks.initialization import BackboneWeights, read_weights
from mooring_lab.streams.slices import select_tasks
from mooring_lab.streams.stream import Stream
from mooring_lab.study.pretraining import read_metadata
from mooring_lab.study.study import Study
from mooring_paper.context.scale import Condition, Regime, Scale
from mooring_paper.context.target_result import ResultTable, TargetResult
from mooring_paper.published.published_numbers import Setting, published_setting, setting_source

Group = TypeVar("Group", bound=Hashable)

MethodRuns = dict[str, dict[str, list[Result]]]
"""Results by data set and method, one for each seed."""


FIRST_TASK = "first task"
"""The part of a stream that is the first of the trained tasks."""


class MissingRuns(Exception):  # noqa: N818  not an error: the schedule trains the runs and calls the target again
    """Request for runs that have no result yet.

    Attributes:
        specs: the runs.
        reject: whether to stop runs after the first task if their penalty does not interpolate.
        decides: whether the results decide which other runs are needed.
    """

    def __init__(self, specs: Sequence[RunSpec], *, reject: bool, decides: bool) -> None:
        super().__init__(f"{pluralize(len(specs), 'run')} {'has' if len(specs) == 1 else 'have'} no result yet")
        self.specs, self.reject, self.decides = specs, reject, decides


class PaperContext:
    """The source of the runs of a reproduction; trains runs that have no result yet.

    Args:
        study: stores the results.
        scale: the data sets, networks and grids.
        backbones: safetensors files to start from, by network; seed k starts from file k modulo their number.
            A network without files starts from random weights.
        device: the device on which the results were trained; that of the study if None.

    Attributes:
        backbones: fingerprints of the backbones, by network.
        weights: the weights of every backbone, by fingerprint.
        levels: the backbones of the main network that `fig-backbone` compares: their accuracy when they were
            pre-trained, by fingerprint.
        backbones_table: the table of backbones, if their files are not there.
        kept_targets: the results of targets that are kept as they are, by name.
        kept_runs: runs that are written with a page even if no target reads them.
        defers_training: whether `run` raises `MissingRuns` instead of training, as `run_targets` needs it.

    Example:
        >>> import tempfile
        >>> from mooring_paper.context.scale import MINIATURE
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     context = PaperContext(Study(f"{folder}/paper.sqlite"), MINIATURE.with_data(None))
        ...     spec = context.spec(MINIATURE.conditions()[0], "ewc", 0, Setting(0.03, 1.0))
        >>> spec.epochs, spec.strength
        (1, 1.0)
    """

    def __init__(
        self,
        study: Study,
        scale: Scale,
        backbones: Mapping[str, Sequence[Path | str]] | None = None,
        device: str | None = None,
    ) -> None:
        self.study, self.scale, self.device = study, scale, device or study.device
        self.weights: dict[str, BackboneWeights] = {}
        self.backbones: dict[str, list[str]] = {}
        for network, paths in (backbones or {}).items():
            self.set_backbones(network, paths)
        self.levels: dict[str, float] = {}
        self.streams: dict[str, Stream] = {}
        self.backbones_table: ResultTable | None = None
        self.kept_targets: Mapping[str, TargetResult] = {}
        self.kept_runs: Sequence[Result] = ()
        self.defers_training = False
        self._full_streams: dict[tuple[str, int | None], Stream] = {}
        self._parts: dict[tuple[str, str, int | None], Stream] = {}
        self._results: dict[bool, dict[RunSpec, Result]] = {False: {}, True: {}}

    def set_backbones(self, network: str, paths: Sequence[Path | str]) -> None:
        """Let the seeds of a network start from these files in turn."""
        self.backbones[network] = [self._read_backbone(path) for path in paths]

    def set_levels(self, paths: Sequence[Path]) -> None:
        """Read the backbones of `fig-backbone`, which the command pre-trained."""
        self.levels = {self._read_backbone(path): float(read_metadata(path)["accuracy"]) for path in paths}

    def search_stream(self, data: str) -> Stream:
        """Return the first tasks of a data set, which the grid search uses."""
        return self._part(data, "searched", None)

    def main_stream(self, data: str, *, shuffle: int | None = None) -> Stream:
        """Return the tasks after the searched ones, for tables and figures; `shuffle` seeds another class order."""
        return self._part(data, "trained", shuffle)

    def first_task(self, data: str) -> Stream:
        """Return the first of the tasks after the searched ones."""
        return self._part(data, FIRST_TASK, None)

    def full_stream(self, data: str) -> Stream:
        """Return all tasks, including the searched ones."""
        return self._part(data, "entire", None)

    def spec(self, condition: Condition, method: str, seed: int, setting: Setting, *, search: bool = False) -> RunSpec:
        """Return the specification of a run, on the searched tasks or on the others."""
        stream = self.search_stream(condition.data) if search else self.main_stream(condition.data)
        regime = condition.regime
        training = Training(condition.network, epochs=regime.epochs, batch=regime.batch, dtype=self.dtype(regime))
        return RunSpec(
            stream.name,
            stream.fingerprint,
            find_method(method).name,
            seed,
            lr=setting.lr,
            strength=setting.strength,
            memory=find_method(method).memory,
            init=self._start(condition.network, seed),
            **training.on(self.device).spec_fields(),
        )

    def seed_specs(
        self, condition: Condition, method: str, setting: Setting, seeds: int | None = None
    ) -> list[RunSpec]:
        """Return the specification of a run for each seed: all of the scale, or the first few."""
        return [self.spec(condition, method, seed, setting) for seed in range(seeds or self.scale.seeds)]

    def with_seed(self, spec: RunSpec, seed: int) -> RunSpec:
        """Return a run with another seed, and with the backbone of that seed."""
        return replace(spec, seed=seed, init=self._start(spec.network, seed))

    def dtype(self, regime: Regime) -> str:
        """Return the dtype of a regime on this device."""
        return regime.gpu_dtype if self.device.startswith("cuda") else "auto"

    def has(self, specs: Sequence[RunSpec]) -> bool:
        """Return whether the results of runs are stored or can be trained."""
        return True

    def run(self, specs: Sequence[RunSpec], *, reject: bool = False, decides: bool = False) -> dict[RunSpec, Result]:
        """Return the results of runs, in order; train the missing ones first, as many at once as possible.

        Targets share many runs: a result is read from the study once.

        Args:
            specs: the runs.
            reject: whether to stop runs after the first task if their penalty does not interpolate.
            decides: whether the results decide which other runs are needed.

        Raises:
            MissingRuns: if results are missing and `defers_training` is set.
        """
        known = self._results[reject]
        specs = list(dict.fromkeys(specs))
        if missing := [spec for spec in specs if spec not in known]:
            request = MissingRuns(missing, reject=reject, decides=decides)
            if self.defers_training:
                raise request
            self.train([request])
        return {spec: known[spec] for spec in specs}

    def run_groups(
        self, groups: Mapping[Group, Sequence[RunSpec]], *, reject: bool = False, decides: bool = False
    ) -> dict[Group, list[Result]]:
        """Return the results of groups of runs, all trained together; see `run`."""
        known = self.run([spec for specs in groups.values() for spec in specs], reject=reject, decides=decides)
        return {group: [known[spec] for spec in specs] for group, specs in groups.items()}

    def train(self, requests: Sequence[MissingRuns]) -> None:
        """Train requested runs, as many at once as possible; results that the study has are read."""
        for reject in (True, False):
            specs = list(dict.fromkeys(s for request in requests if request.reject is reject for s in request.specs))
            if specs:
                results = self.study.run(specs, self.streams, self.weights, reject=reject)
                self._results[reject].update(zip(specs, results, strict=True))

    def _start(self, network: str, seed: int) -> str:
        """Return the backbone of a seed: seeds take those of the network in turn."""
        starts = self.backbones.get(network, [""])
        return starts[seed % len(starts)]

    def _read_backbone(self, path: Path | str) -> str:
        weights = read_weights(path)
        self.weights[weights.fingerprint] = weights
        return weights.fingerprint

    def _part(self, data: str, kind: str, shuffle: int | None) -> Stream:
        """Return a part of a stream; cached, because a fingerprint of the images is slow to compute."""
        if (data, kind, shuffle) not in self._parts:
            if (data, shuffle) not in self._full_streams:
                options = replace({**self.scale.streams, **self.scale.stand_ins}[data], shuffle=shuffle)
                self._full_streams[data, shuffle] = self.study.open(options)
            stream, first = self._full_streams[data, shuffle], self.scale.search_tasks
            if len(stream.tasks) <= first:
                tasks = f"{stream.name} has {len(stream.tasks)} tasks and the search uses {first}"
                raise MooringError(f"{tasks}: give a stream with more tasks")
            parts = {"searched": (0, first), "trained": (first, None), "entire": (0, None), FIRST_TASK: (first, 1)}
            skip, limit = parts[kind]
            order = "" if shuffle is None else ", shuffled"
            part = replace(select_tasks(stream, skip, limit), name=f"{data}, {kind}{order}")
            self.streams[part.fingerprint] = self._parts[data, kind, shuffle] = part
        return self._parts[data, kind, shuffle]


def paper_setting(scale: Scale, condition: Condition, method: str, source: str | None = None) -> Setting:
    """Return the paper's setting of a method; without one, the first of the learning rates and the default strength.

    A variant of a method takes the published setting of its `source`; plain fine-tuning, whose setting the paper does
    not give, takes that of the explicit step.

    Example:
        >>> from mooring_paper.context.scale import PAPER
        >>> paper_setting(PAPER, PAPER.conditions()[1], "si").lr
        0.003
    """
    source = source or setting_source(method)
    setting = published_setting(*condition.where, source)
    if setting is None:
        return Setting(scale.lrs[0], find_method(method).strength)
    return Setting(setting.lr, setting.strength if find_method(method).has_strength else None)


def train_methods(
    context: PaperContext,
    methods: Mapping[str, str],
    settings: Mapping[Condition, Mapping[str, Setting]] | None = None,
) -> MethodRuns:
    """Return the runs of methods on every data set in the first regime, trained together.

    Args:
        context: trains them.
        methods: the method whose setting is used, for each method.
        settings: settings by condition and method; the paper's where one is missing.
    """
    specs = {}
    for condition, (method, source) in product(context.scale.first_conditions(), methods.items()):
        ours = (settings or {}).get(condition, {}).get(source)
        setting = ours or paper_setting(context.scale, condition, method, source)
        specs[condition.data, method] = context.seed_specs(condition, method, setting)
    runs = context.run_groups(specs)
    return {data: {method: runs[data, method] for method in methods} for data in context.scale.streams}


def all_runs(runs: MethodRuns) -> list[Result]:
    """Return the runs of all data sets and methods, each once."""
    return unique_runs(results for methods in runs.values() for results in methods.values())


def unique_runs(groups: Iterable[Iterable[Result]]) -> list[Result]:
    """Return the runs of groups, each once."""
    return list({result.spec: result for group in groups for result in group}.values())
