"""A stream as a user asks for it, by name and a few numbers: everything that can be refused early is."""

from dataclasses import dataclass
from pathlib import Path

import torch

from mooring.errors import MooringError, check_number, check_whole, unknown
from mooring.lab.streams.cuts import by_class, check_per_task, permuted, rotated
from mooring.lab.streams.digits import digits
from mooring.lab.streams.named import NAMED_DATASETS, NamedDataset, fetched_folder
from mooring.lab.streams.progress_callback import ProgressCallback
from mooring.lab.streams.slices import check_task_range, limit_images, limit_source, select_tasks
from mooring.lab.streams.sources import from_folder, scan_folder
from mooring.lab.streams.stream import Source, Split, Stream

__all__ = ["StreamOptions", "open_stream", "stream_descriptions"]

DOMAINS = ("permuted", "rotated")
DIGITS_PER_TASK = 2
DOMAIN_TASKS = 5
DEGREES = 180.0


@dataclass(frozen=True)
class StreamOptions:
    """Which stream: a source, a way to cut it, and how much of it.

    Attributes:
        name: "digits", a named set, or "folder" for any other; cut by class, or with "-permuted" or "-rotated" appended
            by what is done to the images.
        data: the folder; by default where `mooring data fetch` put a named set.
        per_task: classes in a task, for a cut by class; by default the named set's, 2 for digits.
        tasks: how many tasks: 5 permutations or rotations by default; of a cut by class, all.
        skip: leave out that many tasks at the start.
        shuffle: the seed of the order of classes, for a cut by class; None takes them in order.
        seed: of the permutations.
        degrees: the range of the rotations.
        limit: at most that many training images and test images in a task, evenly over the classes, the first first.
        size: height and width of an image in pixels; by default 32, and 8 for digits.
        channels: 3 for RGB (the default), 1 for grey; digits have 1.
        label: the label column of Parquet files.
        skip_broken: leave out images that cannot be read, instead of stopping.

    Example:
        >>> StreamOptions("digits-permuted", per_task=2)
        Traceback (most recent call last):
        ...
        mooring.errors.MooringError: per_task=2 is for a cut by class, and digits-permuted has all classes in every \
task: leave it out
    """

    name: str = "digits"
    data: str | None = None
    per_task: int | None = None
    tasks: int | None = None
    skip: int = 0
    shuffle: int | None = None
    seed: int = 0
    degrees: float = DEGREES
    limit: int | None = None
    size: int | None = None
    channels: int | None = None
    label: str | None = None
    skip_broken: bool = False

    def __post_init__(self) -> None:
        """Refuse what does not go together, before any data is read."""
        for name, kind in (("name", str), ("data", str), ("label", str), ("skip_broken", bool)):
            value = getattr(self, name)
            if not (isinstance(value, kind) or (value is None and name in ("data", "label"))):
                raise MooringError(
                    f"{name}={value!r} is not allowed: give {'text' if kind is str else 'true or false'}"
                )
        if self.base not in stream_descriptions():
            raise unknown(
                "stream",
                self.name,
                [f"{base}{cut}" for cut in ("", "-permuted", "-rotated") for base in stream_descriptions()],
            )
        self._check_numbers()
        self._check_source()
        self._check_cut()

    @property
    def base(self) -> str:
        """The source's name: what is left without the cut."""
        base, _, cut = self.name.rpartition("-")
        return base if cut in DOMAINS else self.name

    @property
    def cut(self) -> str:
        """How it is cut: by "class", "permuted" or "rotated".

        Example:
            >>> StreamOptions("cifar100-rotated").cut
            'rotated'
        """
        cut = self.name.rpartition("-")[2]
        return cut if cut in DOMAINS else "class"

    @property
    def named(self) -> NamedDataset | None:
        """What is known about the source, where it is a named set."""
        return NAMED_DATASETS.get(self.base)

    @property
    def classes_per_task(self) -> int:
        """How many classes a task of a cut by class has, with the default put in.

        Example:
            >>> StreamOptions("flowers102").classes_per_task, StreamOptions("digits").classes_per_task
            (6, 2)
        """
        return self.per_task or (self.named.per_task if self.named else DIGITS_PER_TASK)

    def _check_numbers(self) -> None:
        counts = {"per_task": self.per_task, "tasks": self.tasks, "limit": self.limit, "size": self.size}
        for name, value in counts.items():
            if value is not None:
                check_whole(name, value, 1)
        for name, value in {
            "skip": self.skip,
            "shuffle": 0 if self.shuffle is None else self.shuffle,
            "seed": self.seed,
        }.items():
            check_whole(name, value, 0)
        if self.channels not in (None, 1, 3):
            raise MooringError(f"channels={self.channels!r} is not allowed: give 3 for RGB or 1 for grey")
        check_number("degrees", self.degrees, 0, 360, above=True)

    def _check_cut(self) -> None:
        if self.cut == "class":
            if self.base == "folder" and self.per_task is None:
                raise MooringError("a folder needs per_task: say with --per-task how many classes a task has")
        else:
            for name, value in (("per_task", self.per_task), ("shuffle", self.shuffle)):
                if value is not None:
                    why = f"is for a cut by class, and {self.name} has all classes in every task"
                    raise MooringError(f"{name}={value} {why}: leave it out")
            if self.skip >= (self.tasks or DOMAIN_TASKS):
                raise MooringError(f"skip={self.skip} leaves nothing of {self.tasks or DOMAIN_TASKS} tasks: skip fewer")
        if self.cut != "permuted" and self.seed:
            raise MooringError(f"seed={self.seed} is for {self.base}-permuted, not for {self.name}: leave it out")
        if self.cut != "rotated" and self.degrees != DEGREES:
            raise MooringError(
                f"degrees={self.degrees:g} is for {self.base}-rotated, not for {self.name}: leave it out"
            )

    def _check_source(self) -> None:
        if self.base == "digits":
            given = {"data": self.data, "size": self.size, "channels": self.channels, "label": self.label}
            for name, value in {**given, "skip_broken": self.skip_broken or None}.items():
                if value is not None:
                    raise MooringError(
                        f"{name}={value!r} is for images from a folder, and digits come with scikit-learn: leave it out"
                    )
        if self.base == "folder" and not self.data:
            raise MooringError("a folder stream needs data: give the folder with --data")
        if self.named is not None and self.named.layout == "folders" and self.label is not None:
            raise MooringError(
                f"label={self.label!r} is for Parquet files, and {self.base} is class folders: leave it out"
            )


def stream_descriptions() -> dict[str, str]:
    """Every source a stream can be made of, with one line about it.

    Example:
        >>> list(stream_descriptions())
        ['digits', 'cifar100', 'cifar10', 'flowers102', 'caltech256', 'folder']
    """
    embedded = {"digits": "the 1,797 handwritten digits of scikit-learn, 8 by 8 pixels, nothing to fetch"}
    own = {"folder": "a folder of your own: Parquet files in the Hub's layout, or a folder for each class"}
    return embedded | {name: named.description for name, named in NAMED_DATASETS.items()} | own


def open_stream(options: StreamOptions, progress: ProgressCallback | None = None) -> Stream:
    """Read the source, cut it, and keep what was asked for.

    Args:
        options: which stream.
        progress: told about every so often while images are decoded, which happens once for each data set and size.

    Example:
        >>> stream = open_stream(StreamOptions("digits", skip=1, limit=10))
        >>> len(stream.tasks), len(stream.train), stream.name
        (4, 40, 'digits (2 classes a task), tasks 2 to 5, at most 10 images a task')
    """
    source = _source(options, progress)
    if options.cut == "class":
        stream = select_tasks(
            by_class(source, options.classes_per_task, shuffle=options.shuffle), options.skip, options.tasks
        )
        return limit_images(stream, options.limit) if options.limit else stream
    if options.limit:
        source = limit_source(source, options.limit)
    tasks = options.tasks or DOMAIN_TASKS
    if options.cut == "permuted":
        return select_tasks(permuted(source, tasks, seed=options.seed), options.skip)
    return select_tasks(rotated(source, tasks, degrees=options.degrees), options.skip)


def _source(options: StreamOptions, progress: ProgressCallback | None) -> Source:
    if options.base == "digits":
        return digits()
    named = options.named
    folder = _folder(options, named)
    label = options.label or (named.label if named else None)
    leave_out = named.leave_out if named else ()
    found = scan_folder(folder, label=label, leave_out=leave_out)
    _check_classes(options, folder, len(found.classes))  # before anything is decoded, which can take minutes
    if options.cut == "class" and found.train.labels:
        train, test = (_blank(split.labels) for split in (found.train, found.test))
        by_class(Source(folder.name, train, test, found.classes), options.classes_per_task, shuffle=options.shuffle)
    return from_folder(
        folder,
        name=named.name if named else None,
        size=(options.size, options.size) if options.size else named.size if named else (32, 32),
        channels=options.channels or 3,
        label=label,
        leave_out=leave_out,
        skip_broken=options.skip_broken,
        progress=progress,
    )


def _blank(labels: tuple[int, ...]) -> Split:
    """Labels without their images, to try a cut on."""
    return Split(torch.zeros(len(labels), 1, 1, 1, dtype=torch.uint8), torch.tensor(labels, dtype=torch.int64))


def _check_classes(options: StreamOptions, folder: Path, count: int) -> None:
    """Refuse a cut that the classes found in the folder do not allow."""
    if options.cut != "class":
        return
    named = options.named
    if named and count != named.classes and not (options.per_task or options.label):
        raise MooringError(
            f"{folder} has {count} classes and {named.name} has {named.classes}: give its own folder, or say per_task"
        )
    check_per_task(options.base if named else str(folder), count, options.classes_per_task)
    check_task_range(
        options.base if named else str(folder), count // options.classes_per_task, options.skip, options.tasks
    )


def _folder(options: StreamOptions, named: NamedDataset | None) -> Path:
    """The folder given, or where the set was fetched to; of an archive or a clone, the folder in it with the images."""
    if options.data:
        folder = Path(options.data).expanduser()
    else:
        assert named is not None, "a folder without data was refused"
        fetched = fetched_folder(named)
        if fetched is None:
            raise MooringError(named.how_to_get)
        folder = fetched
    if named and named.subfolder and (folder / named.subfolder).is_dir():
        return folder / named.subfolder
    return folder
