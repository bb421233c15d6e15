"""What is on this machine: Python, torch, devices, extras, data; what is missing, and the command to get it.

Needs torch alone, so that it can tell what else is missing.
"""

import os
import platform
import re
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import mooring

__all__ = ["Environment", "Extra", "examine"]

REQUIREMENT = re.compile(r"^([\w.-]+)[^;>]*(?:>=([\d.]+))?[^;]*(?:;(.*))?$")


@dataclass(frozen=True)
class Extra:
    """An extra of this package.

    Attributes:
        name: what it is called in `pip install "mooring[NAME]"`.
        ready: whether all of it is installed, in versions that are new enough.
        libraries: the version of each of its libraries; None where it is missing.
        missing: those to get: missing, or too old.
    """

    name: str
    ready: bool
    libraries: dict[str, str | None]
    missing: tuple[str, ...]


@dataclass(frozen=True)
class Environment:
    """What `mooring doctor` tells.

    Attributes:
        mooring: version and folder.
        python: version and system.
        torch: version, and whether it is new enough.
        devices: what there is to train on.
        extras: each extra of the package.
        data: the folder of each named image set; None where it has not been fetched. Nothing without the laboratory.
        missing: what is missing, and the command to get it.
    """

    mooring: dict[str, str]
    python: dict[str, str]
    torch: dict[str, Any]
    devices: tuple[dict[str, Any], ...]
    extras: tuple[Extra, ...]
    data: dict[str, str | None]
    missing: tuple[dict[str, str], ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain dictionaries, lists, strings and numbers."""
        return asdict(self)

    def __str__(self) -> str:
        """Lines for people."""
        lines = [f"mooring {self.mooring['version']} in {self.mooring['folder']}"]
        lines.append(f"python {self.python['version']} on {self.python['system']}")
        lines.append(f"torch {self.torch['version']}" + ("" if self.torch["ready"] else ": too old"))
        lines += [f"device {each['name']}: {each['what']}" for each in self.devices]
        for extra in self.extras:
            told = "ready" if extra.ready else f"missing {', '.join(extra.missing)}"
            lines.append(f"extra {extra.name}: {told}")
        lines += [f"data {name}: {folder or 'not fetched'}" for name, folder in self.data.items()]
        width = max((len(each["what"]) for each in self.missing), default=0)
        lines += ["to get what is missing:" if self.missing else "nothing is missing"]
        lines += [f"  {each['what']:<{width}}  {each['get']}" for each in self.missing]
        return "\n".join(lines)


def examine() -> Environment:
    """Look around; nothing is changed, fetched or installed.

    Example:
        >>> examine().mooring["version"] == mooring.__version__
        True
    """
    import torch  # it is here, or mooring would not be

    wanted = _requirements()
    oldest = next((version for extra, name, version in wanted if name == "torch" and not extra), "")
    ready = _new_enough(torch.__version__, oldest)
    missing = [] if ready else [{"what": f"torch {oldest} or newer", "get": "pip install --upgrade torch"}]
    devices = [{"name": "cpu", "what": f"threads {torch.get_num_threads()}, cores {os.cpu_count()}"}]
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        devices.append({"name": f"cuda:{number}", "what": f"{found.name}, {found.total_memory / 2**30:.0f} GiB"})
    if len(devices) == 1 and Path("/dev/nvidia0").exists():
        get = "a torch with CUDA, see https://pytorch.org/get-started/locally"
        missing.append({"what": "a GPU is here that torch cannot use", "get": get})
    extras = [_extra(name, wanted) for name in dict.fromkeys(extra for extra, _, _ in wanted if extra)]
    missing += [{"what": f"extra {e.name}", "get": f'pip install "mooring[{e.name}]"'} for e in extras if not e.ready]
    if not wanted:
        missing.append({"what": "mooring is not installed, only found", "get": "pip install -e . in its checkout"})
    data, commands = _data()
    missing += [{"what": f"data {name}", "get": commands[name]} for name, folder in data.items() if folder is None]
    return Environment(
        mooring={"version": mooring.__version__, "folder": str(Path(mooring.__file__).parent)},
        python={"version": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"},
        torch={"version": torch.__version__, "ready": ready, "cuda": torch.version.cuda},
        devices=tuple(devices),
        extras=tuple(extras),
        data=data,
        missing=tuple(missing),
    )


def _requirements() -> list[tuple[str, str, str]]:
    """(extra, library, oldest version) of each requirement that counts on this Python; dev is for working on it."""
    try:
        told = metadata.requires("mooring") or []
    except metadata.PackageNotFoundError:
        return []
    found = []
    for line in told:
        match = REQUIREMENT.match(line)
        assert match, line
        name, oldest, marker = match[1], match[2] or "", match[3] or ""
        below = re.search(r"python_version < '(\d+)\.(\d+)'", marker)
        if below and sys.version_info >= (int(below[1]), int(below[2])):
            continue
        extra = re.search(r"extra == '(\w+)'", marker)
        found.append((extra[1] if extra else "", name, oldest))
    return [each for each in found if each[0] != "dev"]


def _extra(name: str, wanted: list[tuple[str, str, str]]) -> Extra:
    libraries: dict[str, str | None] = {}
    missing = []
    for library, oldest in ((library, oldest) for extra, library, oldest in wanted if extra == name):
        try:
            libraries[library] = version = metadata.version(library)
        except metadata.PackageNotFoundError:
            libraries[library] = None
            missing.append(library)
            continue
        if not _new_enough(version, oldest):
            missing.append(f"{library} {oldest} or newer")
    return Extra(name, not missing, libraries, tuple(missing))


def _data() -> tuple[dict[str, str | None], dict[str, str]]:
    """Where each named set is, and how to get it."""
    try:
        from mooring.lab.streams.named_datasets import NAMED_DATASETS, fetched_folder
    except ModuleNotFoundError:
        return {}, {}
    folders = {name: fetched_folder(named) for name, named in NAMED_DATASETS.items()}
    commands = {
        name: f"mooring data {'info' if named.manual_steps else 'fetch'} {name}"
        for name, named in NAMED_DATASETS.items()
    }
    return {name: str(folder) if folder else None for name, folder in folders.items()}, commands


def _new_enough(version: str, oldest: str) -> bool:
    numbers = [[int(part) for part in re.findall(r"\d+", each.partition("+")[0])[:3]] for each in (version, oldest)]
    return numbers[0] >= numbers[1]
