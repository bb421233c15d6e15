"""A folder of class folders, and Caltech-256's public layout in particular."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mooring.errors import MooringError
from mooring.lab.streams.decode import EncodedImage, FolderContents

__all__ = ["FolderSplit", "read_folder"]

IMAGES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
SPLITS = {"train": "train", "test": "test", "val": "test", "valid": "test", "validation": "test"}


@dataclass(frozen=True)
class FolderSplit:
    """Where the images of one split are: (file, label) in a fixed order."""

    files: tuple[tuple[Path, int], ...]

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files."""
        return tuple(path for path, _ in self.files)

    @property
    def labels(self) -> tuple[int, ...]:
        """The label of each file: the number of the folder it is in."""
        return tuple(label for _, label in self.files)

    @property
    def count(self) -> int:
        """How many images there are."""
        return len(self.files)

    def images(self) -> Iterator[EncodedImage]:
        """Each image's bytes, read when asked for."""
        for path, label in self.files:
            yield EncodedImage(path.read_bytes(), str(path), label)


def read_folder(folder: Path, *, leave_out: tuple[str, ...] = (), test_share: float = 0.2) -> FolderContents:
    """The images of a folder: train/CLASS/... and test/CLASS/..., or CLASS/... cut by file order.

    Without train and test folders, the last `test_share` of each class's files, in the order of their names, is for
    testing (at least one, if the class has two).

    Args:
        folder: the folder.
        leave_out: class folders to ignore, such as Caltech-256's "257.clutter".
        test_share: the share of each class that is for testing, where the folder does not say.
    """
    if not folder.is_dir():
        wrong = f"{folder} is a file" if folder.exists() else f"there is no folder {folder}"
        raise MooringError(f"{wrong}: give a folder with one for each class, such as photos/cat/1.jpg")
    inside = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    named = {SPLITS[path.name]: path for path in inside if path.name in SPLITS}
    if named.keys() >= {"train", "test"}:
        classes = tuple(sorted({c.name for split in named.values() for c in _class_folders(split, leave_out)}))
        number = {name: label for label, name in enumerate(classes)}
        listings = {
            kind: FolderSplit(
                tuple((p, number[c.name]) for c in _class_folders(path, leave_out) for p in _image_files(c))
            )
            for kind, path in named.items()
        }
    else:
        folders = _class_folders(folder, leave_out)
        classes = tuple(c.name for c in folders)
        train: list[tuple[Path, int]] = []
        test: list[tuple[Path, int]] = []
        for label, path in enumerate(folders):
            files = _image_files(path)
            held_out = min(max(1, round(test_share * len(files))), len(files) - 1) if len(files) > 1 else 0
            cut = len(files) - held_out
            train += [(file, label) for file in files[:cut]]
            test += [(file, label) for file in files[cut:]]
        listings = {"train": FolderSplit(tuple(train)), "test": FolderSplit(tuple(test))}
    if not listings["train"].files:
        raise MooringError(f"{folder} holds no images: put them in a folder for each class, such as {folder}/cat/1.jpg")
    return FolderContents(classes, listings["train"], listings["test"])


def _class_folders(folder: Path, leave_out: tuple[str, ...]) -> list[Path]:
    inside = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    return [path for path in inside if path.name not in leave_out]


def _image_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path.suffix.lower() in IMAGES and path.is_file()]
