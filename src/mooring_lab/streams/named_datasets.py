"""Named image data sets: their contents, the paper's tasks, and where to get them."""

import os
from dataclasses import dataclass
from pathlib import Path

from mooring.errors import unknown


@dataclass(frozen=True)
class NamedDataset:
    """A named image data set.

    Attributes:
        name: the data set's name.
        description: a description in one line.
        classes: the number of classes.
        per_task: the number of classes of a task in the paper.
        train: the number of training images.
        test: the number of test images.
        bytes: the approximate size of the download.
        layout: "parquet" for files in the Hub's layout, "folders" for one folder per class.
        homepage: the page of its authors.
        repository: the repository on the Hub to fetch from; empty if the data set is not fetched from the Hub.
        revision: the commit, so that everybody gets the same bytes.
        files: pairs (pattern in the repository, split that the files are used for), in order.
        manual_steps: how to get a data set that is not on the Hub.
        subfolder: the folder with the images inside a clone of the repository or the unpacked archive.
        label: the label column of Parquet files.
        leave_out: names of class folders to ignore.
        unused: how many classes at the end are in no task, because they would not fill one.
        size: the height and width of images in the paper.
        licence: the licence that the authors state.
        note: remarks for a user who compares numbers.
    """

    name: str
    description: str
    classes: int
    per_task: int
    train: int
    test: int
    bytes: int
    layout: str
    homepage: str
    repository: str = ""
    revision: str = ""
    files: tuple[tuple[str, str], ...] = ()
    manual_steps: str = ""
    subfolder: str = ""
    label: str | None = None
    leave_out: tuple[str, ...] = ()
    unused: int = 0
    size: tuple[int, int] = (32, 32)
    licence: str = "none stated by the authors"
    note: str = ""

    @property
    def tasks(self) -> int:
        """The number of tasks in the paper.

        Example:
            >>> NAMED_DATASETS["flowers102"].tasks
            17
        """
        return self.classes // self.per_task

    @property
    def how_to_get(self) -> str:
        """One line that says how to get the data set.

        Example:
            >>> NAMED_DATASETS["cifar10"].how_to_get
            'cifar10 is not on this machine: run `mooring data fetch cifar10`, or give its folder with --data'
        """
        steps = self.manual_steps or f"run `mooring data fetch {self.name}`, or give its folder with --data"
        return f"{self.name} is not on this machine: {steps}"


NAMED_DATASETS: dict[str, NamedDataset] = {
    "cifar100": NamedDataset(
        name="cifar100",
        description="CIFAR-100: small photographs in 100 classes, 32 by 32 pixels",
        classes=100,
        per_task=10,
        train=50_000,
        test=10_000,
        bytes=142_000_000,
        layout="parquet",
        homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
        repository="uoft-cs/cifar100",
        revision="aadb3af77e9048adbea6b47c21a81e47dd092ae5",
        files=(("cifar100/train-*.parquet", "train"), ("cifar100/test-*.parquet", "test")),
        subfolder="cifar100",
        label="fine_label",
        note="the official splits and order; classes are the 100 fine labels, in alphabetical order",
    ),
    "cifar10": NamedDataset(
        name="cifar10",
        description="CIFAR-10: small photographs in 10 classes, 32 by 32 pixels",
        classes=10,
        per_task=2,
        train=50_000,
        test=10_000,
        bytes=144_000_000,
        layout="parquet",
        homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
        repository="uoft-cs/cifar10",
        revision="0b2714987fa478483af9968de7c934580d0bb9a2",
        files=(("plain_text/train-*.parquet", "train"), ("plain_text/test-*.parquet", "test")),
        subfolder="plain_text",
        label="label",
        note="the official splits and order; five tasks of two classes are common; it is no stream of the paper",
    ),
    "flowers102": NamedDataset(
        name="flowers102",
        description="Oxford Flowers-102: photographs of 102 kinds of flowers, resized to 32 by 32",
        classes=102,
        per_task=6,
        train=7_169,
        test=1_020,
        bytes=347_000_000,
        layout="parquet",
        homepage="https://www.robots.ox.ac.uk/~vgg/data/flowers/102/",
        repository="Donghyun99/Oxford-Flower-102",
        revision="7e43fe37eeb9278138ab0bd2d0abb10d0f703d09",
        # the paper trains on about 72 images per class, which are the official test and validation images
        files=(
            ("data/test-*.parquet", "train"),
            ("data/validation-*.parquet", "train"),
            ("data/train-*.parquet", "test"),
        ),
        label="label",
        note=(
            "splits are swapped as in the paper: training uses the official test and validation images "
            "(about 72 per class), evaluation uses the official training images (10 per class); "
            "the splits of a folder given with --data are not swapped"
        ),
    ),
    "caltech256": NamedDataset(
        name="caltech256",
        description="Caltech-256: photographs of 256 kinds of objects, resized to 32 by 32",
        classes=256,
        per_task=8,
        train=23_824,
        test=5_956,
        bytes=1_200_000_000,
        layout="folders",
        homepage="https://data.caltech.edu/records/nyy15-4j048",
        manual_steps=(
            "get 256_ObjectCategories.tar (1.2 GB) from https://data.caltech.edu/records/nyy15-4j048, unpack it, and "
            "give the folder that holds 256_ObjectCategories/001.ak47/001_0001.jpg with --data"
        ),
        subfolder="256_ObjectCategories",
        leave_out=("257.clutter",),
        licence="see https://data.caltech.edu/records/nyy15-4j048",
        note="257.clutter is left out; the last fifth of each class's files, ordered by name, are test images",
    ),
    "caltech101": NamedDataset(
        name="caltech101",
        description="Caltech-101: photographs of 101 kinds of objects, 31 to 800 of each, resized to 32 by 32",
        classes=96,
        per_task=8,
        train=6_743,
        test=1_686,
        bytes=14_000_000,
        layout="parquet",
        homepage="https://data.caltech.edu/records/mzrjq-6wc02",
        manual_steps=(
            "get it from https://data.caltech.edu/records/mzrjq-6wc02, and give a folder with train-*.parquet and "
            "test-*.parquet in the layout of the Hub with --data"
        ),
        label="label",
        unused=5,
        licence="see https://data.caltech.edu/records/mzrjq-6wc02",
        note="no stream of the paper; the first 96 classes in alphabetical order, without background images",
    ),
}


def find_dataset(name: str) -> NamedDataset:
    """Return the data set of that name.

    Example:
        >>> find_dataset("cifar10").per_task
        2
        >>> find_dataset("cifar")
        Traceback (most recent call last):
        ...
        mooring.errors.MooringError: unknown data set 'cifar' (did you mean 'cifar10'?); allowed: cifar100, cifar10, \
flowers102, caltech256, caltech101
    """
    if name not in NAMED_DATASETS:
        raise unknown("data set", name, NAMED_DATASETS)
    return NAMED_DATASETS[name]


def default_folder(name: str) -> Path:
    """Return the default folder of a data set: $MOORING_DATA/NAME, or mooring/data/NAME in the user's cache."""
    if home := os.environ.get("MOORING_DATA"):
        return Path(home).expanduser() / name
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mooring" / "data" / name


def fetched_folder(dataset: NamedDataset) -> Path | None:
    """Return the default folder if the data set was fetched, else None; a folder that exists is complete."""
    folder = default_folder(dataset.name)
    return folder if folder.is_dir() else None
