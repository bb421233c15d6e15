"""Images in one folder per class, such as Caltech-256's public layout."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mooring.errors import MooringError
from mooring_lab.streams.decode import EncodedImage, FolderContents

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
TEST_FOLDERS = ("test", "val", "valid", "validation")
"""Names of the folder of test images; the first that exists is taken, and the others are not used."""


@dataclass(frozen=True)
class FolderSplit:
    """One split of a data set in class folders: files in a fixed order, with the numbers of their class folders."""

    paths: tuple[Path, ...]
    labels: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of images."""
        return len(self.paths)

    def images(self) -> Iterator[EncodedImage]:
        """Yield the images, read one at a time."""
        for path, label in zip(self.paths, self.labels, strict=True):
            yield EncodedImage(path.read_bytes(), str(path), label)


def read_folder(folder: Path, *, leave_out: tuple[str, ...] = (), test_share: float = 0.2) -> FolderContents:
    """List the images of a folder with train/CLASS/... and test/CLASS/..., or with CLASS/... alone.

    Without train and test folders, the last `test_share` of each class's files, in the order of their names, are test
    images. A class with two or more images has at least one test image. Class folders with a name in `leave_out`, such
    as "257.clutter", are ignored. With test and val folders, the second is not used, and is in `unused`.
    """
    if not folder.is_dir():
        problem = f"{folder} is a file" if folder.exists() else f"there is no folder {folder}"
        raise MooringError(f"{problem}: give a folder with one for each class, such as photos/cat/1.jpg")
    subfolders = {path.name: path for path in _class_folders(folder)}
    scored = [name for name in TEST_FOLDERS if name in subfolders]
    files: dict[str, list[tuple[Path, int]]] = {"train": [], "test": []}
    unused: list[str] = []
    is_split = "train" in subfolders and bool(scored)
    if is_split:
        unused = [name for name in subfolders if name not in ("train", scored[0])]
        split_folders = {"train": subfolders["train"], "test": subfolders[scored[0]]}
        folders = {kind: _class_folders(path, leave_out) for kind, path in split_folders.items()}
        classes = sorted({path.name for paths in folders.values() for path in paths})
        labels = {name: label for label, name in enumerate(classes)}
        for kind, paths in folders.items():
            files[kind] = [(file, labels[path.name]) for path in paths for file in _image_files(path)]
    else:
        paths = _class_folders(folder, leave_out)
        classes = [path.name for path in paths]
        for label, path in enumerate(paths):
            images = _image_files(path)
            cut = len(images) - min(max(1, round(test_share * len(images))), max(0, len(images) - 1))
            files["train"] += [(file, label) for file in images[:cut]]
            files["test"] += [(file, label) for file in images[cut:]]
    if not files["train"]:
        raise MooringError(f"{folder} holds no images: put them in a folder for each class, such as {folder}/cat/1.jpg")
    train, test = (
        FolderSplit(tuple(path for path, _ in files[kind]), tuple(label for _, label in files[kind]))
        for kind in ("train", "test")
    )
    return FolderContents(tuple(classes), train, test, tuple(unused), scored[0] if is_split else None)


def _class_folders(folder: Path, leave_out: tuple[str, ...] = ()) -> list[Path]:
    inside = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    return [path for path in inside if path.name not in leave_out]


def _image_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path.suffix.lower() in SUFFIXES and path.is_file()]
