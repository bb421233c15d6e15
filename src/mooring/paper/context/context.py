"""Where targets get their runs: one study, the data sets, and the backbones to start from."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mooring.errors import MooringError
from mooring.lab.methods import find_method
from mooring.lab.model.plurals import pluralize
from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec
from mooring.lab.model.training import Training
from mooring.lab.networks.initialization import BackboneWeights, read_weights
from mooring.lab.streams.slices import select_tasks
from mooring.lab.streams.stream import Stream
from mooring.lab.study.study import Study
from mooring.paper.context.scale import Case, Scale
from mooring.paper.published.published_numbers import Setting

__all__ = ["Awaited", "Laboratory"]


class Awaited(Exception):  # noqa: N818  it is no error: the runs are trained, and the target is asked again
    """Raised where runs have no result yet.

    Attributes:
        specs: the runs.
        reject: whether those whose penalty does not interpolate are taken out after the first task.
        decides: whether it hangs on their results which other runs are needed.
    """

    def __init__(self, specs: Sequence[RunSpec], *, reject: bool, decides: bool) -> None:
        super().__init__(f"{pluralize(len(specs), 'run')} {'has' if len(specs) == 1 else 'have'} no result yet")
        self.specs, self.reject, self.decides = specs, reject, decides


class Laboratory:
    """Makes the runs of a reproduction, and trains those that have no result yet.

    Args:
        study: keeps the results.
        scale: which data sets, networks and grids there are.
        backbones: safetensors files to start from, by network; a run of seed k starts from the k-th, round and round.
            Networks without any start from random weights.
        device: the device that results come from, where they were trained elsewhere; the study's own if None.
        instead: another backbone of the main network, to see what the backbone changes.

    Attributes:
        gathers: whether runs that are missing are not trained at once but asked for, with those of others; see
            `mooring.paper.schedule`.

    Example:
        >>> import tempfile
        >>> from mooring.paper.context.scale import MINIATURE
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lab = Laboratory(Study(f"{folder}/paper.sqlite"), MINIATURE.on(None))
        ...     spec = lab.spec(MINIATURE.cases()[0], "ewc", 0, Setting(0.03, 1.0))
        >>> spec.epochs, spec.strength
        (1, 1.0)
    """

    def __init__(
        self,
        study: Study,
        scale: Scale,
        backbones: Mapping[str, Sequence[Path | str]] | None = None,
        device: str | None = None,
        instead: Path | str | None = None,
    ) -> None:
        self.study, self.scale, self.device = study, scale, device or study.device
        self.weights: dict[str, BackboneWeights] = {}
        self.starts: dict[str, list[str]] = {}
        for network, paths in (backbones or {}).items():
            read = [read_weights(path) for path in paths]
            self.weights |= {each.fingerprint: each for each in read}
            self.starts[network] = [each.fingerprint for each in read]
        self.instead = ""
        if instead is not None:
            other = read_weights(instead)
            self.weights[other.fingerprint], self.instead = other, other.fingerprint
        self.whole: dict[tuple[str, int | None], Stream] = {}
        self.parts: dict[tuple[str, str, int | None], Stream] = {}
        self.streams: dict[str, Stream] = {}
        self.known: dict[bool, dict[RunSpec, Result]] = {False: {}, True: {}}
        self.gathers = False

    def searched(self, data: str) -> Stream:
        """The first tasks of a data set, for the grid search."""
        return self._part(data, "searched", None)

    def trained(self, data: str, *, shuffle: int | None = None) -> Stream:
        """The tasks after those, for everything else.

        Args:
            data: the name of the data set.
            shuffle: the seed of another order of classes; None takes the paper's.
        """
        return self._part(data, "trained", shuffle)

    def entire(self, data: str) -> Stream:
        """All tasks, those that are searched too."""
        return self._part(data, "entire", None)

    def spec(self, case: Case, method: str, seed: int, setting: Setting, *, search: bool = False) -> RunSpec:
        """A run.

        Args:
            case: network, regime and data set.
            method: a name from the registry.
            seed: of the run.
            setting: its learning rate and strength.
            search: whether it goes through the searched tasks or through the others.
        """
        stream = self.searched(case.data) if search else self.trained(case.data)
        starts = self.starts.get(case.network, [""])
        dtype = case.regime.on_gpu if self.device.startswith("cuda") else "auto"
        training = Training(case.network, epochs=case.regime.epochs, batch=case.regime.batch, dtype=dtype)
        return RunSpec(
            stream.name,
            stream.fingerprint,
            find_method(method).name,
            seed,
            lr=setting.lr,
            strength=setting.strength,
            memory=find_method(method).memory,
            init=starts[seed % len(starts)],
            **training.on(self.device).spec_fields(),
        )

    def run(self, specs: Sequence[RunSpec], *, reject: bool = False, decides: bool = False) -> dict[RunSpec, Result]:
        """Their results, in their order; those that are missing are trained first, many at once.

        What was asked for before is not read again: targets share many of their runs.

        Args:
            specs: the runs.
            reject: take out runs whose penalty does not interpolate after the first task.
            decides: whether it hangs on their results which other runs are needed.

        Raises:
            Awaited: if some are missing while this laboratory gathers.
        """
        known = self.known[reject]
        asked = list(dict.fromkeys(specs))
        if missing := [spec for spec in asked if spec not in known]:
            awaited = Awaited(missing, reject=reject, decides=decides)
            if self.gathers:
                raise awaited
            self.train([awaited])
        return {spec: known[spec] for spec in asked}

    def train(self, awaited: Sequence[Awaited]) -> None:
        """Train what is awaited, as many at once as can be; what the study has is not trained again."""
        for reject in (True, False):
            specs = list(dict.fromkeys(spec for each in awaited if each.reject is reject for spec in each.specs))
            if specs:
                found = self.study.run(specs, self.streams, self.weights, reject=reject)
                self.known[reject].update(zip(specs, found, strict=True))

    def _part(self, data: str, kind: str, shuffle: int | None) -> Stream:
        """Each is cut once: to fingerprint the images of one takes longer than to look up its runs."""
        if (data, kind, shuffle) not in self.parts:
            if (data, shuffle) not in self.whole:
                options = replace(self.scale.streams[data], shuffle=shuffle)
                self.whole[data, shuffle] = self.study.open(options)
            stream, first = self.whole[data, shuffle], self.scale.search_tasks
            if len(stream.tasks) <= first:
                count = len(stream.tasks)
                raise MooringError(f"{stream.name} has {count} tasks: {first} are searched, and some must be left")
            skip, tasks = {"searched": (0, first), "trained": (first, None), "entire": (0, None)}[kind]
            order = "" if shuffle is None else ", shuffled"
            part = replace(select_tasks(stream, skip, tasks), name=f"{data}, {kind}{order}")
            self.streams[part.fingerprint] = self.parts[data, kind, shuffle] = part
        return self.parts[data, kind, shuffle]
