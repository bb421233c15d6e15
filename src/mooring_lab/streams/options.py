"""The options of a stream, checked before any data is read, and the opening of the stream."""

from dataclasses import dataclass
from pathlib import Path

import torch

from mooring.errors import MooringError, check_number, check_whole, unknown
from mooring_lab.model.scenarios import SCENARIOS
from mooring_lab.streams.cuts import by_class, check_per_task, permuted, rotated
from mooring_lab.streams.decode import FolderContents
from mooring_lab.streams.digits import digits
from mooring_lab.streams.named_datasets import NAMED_DATASETS, NamedDataset, fetched_folder
from mooring_lab.streams.progress_callback import ProgressCallback
from mooring_lab.streams.slices import check_task_range, limit_images, limit_source, select_tasks
from mooring_lab.streams.sources import first_classes, from_folder, scan_folder
from mooring_lab.streams.stream import Source, Split, Stream, in_scenario

TRANSFORMS = ("permuted", "rotated")
DIGITS_PER_TASK = 2
TRANSFORM_TASKS = 5
DEFAULT_DEGREES = 180.0


@dataclass(frozen=True)
class StreamOptions:
    """The options of a stream: a data set, a cut into tasks, and a part of it.

    Attributes:
        name: "digits", the name of a data set, or "folder". It is cut by class, or, with "-permuted" or "-rotated"
            appended, by a transformation of the images.
        data: the folder of the images; by default the folder of `mooring data fetch`.
        per_task: the number of classes of a task, for a cut by class; by default the data set's, 2 for digits.
        tasks: the number of tasks; by default all of a cut by class, and 5 permutations or rotations.
        skip: the number of tasks to leave out at the start.
        shuffle: the seed of the order of classes, for a cut by class; None keeps them in order.
        seed: the seed of the permutations.
        degrees: the range of the rotations.
        limit: the largest number of training images and of test images of a task, evenly over the classes, first ones
            first.
        size: the height and width of an image in pixels; by default 32, and 8 for digits.
        channels: 3 for RGB (the default), 1 for grey; digits have 1.
        label: the label column of Parquet files.
        skip_broken: leave out images that cannot be read, instead of stopping.
        scenario: "task", "class" or "domain"; by default "task" for a cut by class, and "domain" for a transformation.

    Example:
        >>> StreamOptions("digits-permuted", per_task=2)
        Traceback (most recent call last):
        ...
        mooring.errors.MooringError: per_task=2 is for streams that divide classes, and digits-permuted has all \
classes in every task: leave it out
    """

    name: str = "digits"
    data: str | None = None
    per_task: int | None = None
    tasks: int | None = None
    skip: int = 0
    shuffle: int | None = None
    seed: int = 0
    degrees: float = DEFAULT_DEGREES
    limit: int | None = None
    size: int | None = None
    channels: int | None = None
    label: str | None = None
    skip_broken: bool = False
    scenario: str | None = None

    def __post_init__(self) -> None:
        """Check every value and every combination."""
        for name, kind in (("name", str), ("data", str), ("label", str), ("skip_broken", bool)):
            value = getattr(self, name)
            if not (isinstance(value, kind) or (value is None and name in ("data", "label"))):
                allowed = "text" if kind is str else "true or false"
                raise MooringError(f"{name}={value!r} is not allowed: give {allowed}")
        if self.base not in stream_descriptions():
            bases = stream_descriptions()
            names = [f"{base}{cut}" for cut in ("", "-permuted", "-rotated") for base in bases]
            rule = f"allowed: {', '.join(bases)}, each also with -permuted or -rotated"
            raise unknown("stream", self.name, names, rule)
        if self.scenario is not None and self.scenario not in SCENARIOS:
            raise unknown("scenario", self.scenario, SCENARIOS)
        self._check_numbers()
        self._check_source()
        self._check_cut()

    @property
    def base(self) -> str:
        """The name without the cut: "digits", the name of a data set, or "folder"."""
        base, _, cut = self.name.rpartition("-")
        return base if cut in TRANSFORMS else self.name

    @property
    def cut(self) -> str:
        """The cut: "class", "permuted" or "rotated".

        Example:
            >>> StreamOptions("cifar100-rotated").cut
            'rotated'
        """
        cut = self.name.rpartition("-")[2]
        return cut if cut in TRANSFORMS else "class"

    @property
    def chosen_scenario(self) -> str:
        """The scenario, given or default.

        Example:
            >>> StreamOptions("digits").chosen_scenario, StreamOptions("digits-permuted").chosen_scenario
            ('task', 'domain')
        """
        return self.scenario or ("task" if self.cut == "class" else "domain")

    @property
    def dataset(self) -> NamedDataset | None:
        """The named data set; None for digits and for a folder."""
        return NAMED_DATASETS.get(self.base)

    @property
    def classes_per_task(self) -> int:
        """The number of classes of a task in a cut by class, given or default.

        Example:
            >>> StreamOptions("flowers102").classes_per_task, StreamOptions("digits").classes_per_task
            (6, 2)
        """
        return self.per_task or (self.dataset.per_task if self.dataset else DIGITS_PER_TASK)

    def _check_numbers(self) -> None:
        for name, low in {"per_task": 1, "tasks": 1, "limit": 1, "size": 1, "skip": 0, "shuffle": 0, "seed": 0}.items():
            if getattr(self, name) is not None or name in ("skip", "seed"):
                check_whole(name, getattr(self, name), low)
        if self.channels not in (None, 1, 3):
            raise MooringError(f"channels={self.channels!r} is not allowed: give 3 for RGB or 1 for grey")
        check_number("degrees", self.degrees, 0, 360, above=True)

    def _check_cut(self) -> None:
        if self.cut == "class" and self.base == "folder" and self.per_task is None:
            raise MooringError("a folder stream needs per_task: give the number of classes of a task with --per-task")
        if self.cut != "class":
            for name, value in (("per_task", self.per_task), ("shuffle", self.shuffle)):
                if value is not None:
                    reason = f"is for streams that divide classes, and {self.name} has all classes in every task"
                    raise MooringError(f"{name}={value} {reason}: leave it out")
            if self.skip >= (count := self.tasks or TRANSFORM_TASKS):
                raise MooringError(f"skip={self.skip} leaves nothing of {count} tasks: skip fewer")
        if self.cut != "permuted" and self.seed:
            raise MooringError(f"seed={self.seed} is for {self.base}-permuted, not for {self.name}: leave it out")
        if self.cut != "rotated" and self.degrees != DEFAULT_DEGREES:
            reason = f"is for {self.base}-rotated, not for {self.name}"
            raise MooringError(f"degrees={self.degrees:g} {reason}: leave it out")

    def _check_source(self) -> None:
        if self.base == "digits":
            given = {"data": self.data, "size": self.size, "channels": self.channels, "label": self.label}
            for name, value in {**given, "skip_broken": self.skip_broken or None}.items():
                if value is not None:
                    reason = "is for images from a folder, and digits come with scikit-learn"
                    raise MooringError(f"{name}={value!r} {reason}: leave it out")
        if self.base == "folder" and not self.data:
            raise MooringError("a folder stream needs data: give the folder with --data")
        if self.dataset is not None and self.dataset.layout == "folders" and self.label is not None:
            reason = f"is for Parquet files, and {self.base} is class folders"
            raise MooringError(f"label={self.label!r} {reason}: leave it out")


def stream_descriptions() -> dict[str, str]:
    """Return a description in one line for every name that a stream can have, without the cuts.

    Example:
        >>> list(stream_descriptions())
        ['digits', 'cifar100', 'cifar10', 'flowers102', 'caltech256', 'caltech101', 'folder']
    """
    embedded = {"digits": "the 1,797 handwritten digits of scikit-learn, 8 by 8 pixels, no download"}
    own = {"folder": "a folder of your own: Parquet files in the Hub's layout, or a folder for each class"}
    return embedded | {name: dataset.description for name, dataset in NAMED_DATASETS.items()} | own


def open_stream(options: StreamOptions, progress: ProgressCallback | None = None) -> Stream:
    """Read a data set, cut it into tasks, and return the selected part.

    Args:
        options: the options of the stream.
        progress: called while images are decoded, which happens once for each data set and size.

    Example:
        >>> stream = open_stream(StreamOptions("digits", skip=1, limit=10))
        >>> len(stream.tasks), len(stream.train), stream.name
        (4, 40, 'digits (2 classes a task), tasks 2 to 5, at most 10 images a task')
    """
    return in_scenario(_cut(options, _read_source(options, progress)), options.chosen_scenario)


def _cut(options: StreamOptions, source: Source) -> Stream:
    """Cut a data set into tasks, and return the selected part."""
    if options.cut == "class":
        stream = by_class(source, options.classes_per_task, shuffle=options.shuffle)
        stream = select_tasks(stream, options.skip, options.tasks)
        return limit_images(stream, options.limit) if options.limit else stream
    if options.limit:
        source = limit_source(source, options.limit)
    tasks = options.tasks or TRANSFORM_TASKS
    if options.cut == "permuted":
        return select_tasks(permuted(source, tasks, seed=options.seed), options.skip)
    return select_tasks(rotated(source, tasks, degrees=options.degrees), options.skip)


def _read_source(options: StreamOptions, progress: ProgressCallback | None) -> Source:
    if options.base == "digits":
        return digits()
    dataset = options.dataset
    folder = _image_folder(options)
    label = options.label or (dataset.label if dataset else None)
    leave_out = dataset.leave_out if dataset else ()
    contents = scan_folder(folder, label=label, leave_out=leave_out)
    if options.cut == "class":
        _check_classes(options, folder, contents)
    source = from_folder(
        folder,
        name=dataset.name if dataset else None,
        size=(options.size, options.size) if options.size else dataset.size if dataset else (32, 32),
        channels=options.channels or 3,
        label=label,
        leave_out=leave_out,
        skip_broken=options.skip_broken,
        progress=progress,
    )
    return first_classes(source, _used_classes(options, len(source.classes)))


def _used_classes(options: StreamOptions, count: int) -> int:
    """Return how many of the classes of a folder are in a task: all, or those that a named data set uses."""
    dataset = options.dataset
    return dataset.classes if dataset and count == dataset.classes + dataset.unused else count


def _check_classes(options: StreamOptions, folder: Path, contents: FolderContents) -> None:
    """Raise an error if a folder does not allow a cut by class, before its images are decoded, which takes minutes."""
    dataset, count = options.dataset, _used_classes(options, len(contents.classes))
    if dataset and count != dataset.classes and not (options.per_task or options.label):
        raise MooringError(
            f"{folder} has {count} classes and {dataset.name} has {dataset.classes}: give its own folder, "
            "or say per_task"
        )
    name = options.base if dataset else str(folder)
    check_per_task(name, count, options.classes_per_task)
    check_task_range(name, count // options.classes_per_task, options.skip, options.tasks)
    if contents.train.labels:  # try the cut on blank images
        train, test = (
            Split(torch.zeros(len(labels), 1, 1, 1, dtype=torch.uint8), torch.tensor(labels, dtype=torch.int64))
            for labels in (contents.train.labels, contents.test.labels)
        )
        by_class(Source(folder.name, train, test, contents.classes), options.classes_per_task, shuffle=options.shuffle)


def _image_folder(options: StreamOptions) -> Path:
    """Return the given or the fetched folder; inside an archive or a clone, the subfolder with the images."""
    dataset = options.dataset
    folder = Path(options.data).expanduser() if options.data else dataset and fetched_folder(dataset)
    if not isinstance(folder, Path):
        assert dataset is not None, "StreamOptions refuses a folder stream without data"
        raise MooringError(dataset.how_to_get)
    if dataset and dataset.subfolder and (folder / dataset.subfolder).is_dir():
        return folder / dataset.subfolder
    return folder
