"""The environment that `mooring doctor` shows: Python, torch, devices, extras and data sets."""

import os
import platform
import re
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import mooring

DISTRIBUTIONS = ("mooring", "mooring-lab")
"""The distributions whose requirements are examined."""

REQUIREMENT = re.compile(r"^([\w.-]+)[^;>]*(?:>=([\d.]+))?[^;]*(?:;(.*))?$")


@dataclass(frozen=True)
class Extra:
    """An optional set of libraries.

    Attributes:
        name: what `pip install` takes, such as "mooring[transformers]".
        ready: whether all its libraries are installed in versions that are new enough.
        libraries: the installed version of each library; None if it is not installed.
        missing: the libraries that are not installed or too old.
    """

    name: str
    ready: bool
    libraries: dict[str, str | None]
    missing: tuple[str, ...]


@dataclass(frozen=True)
class Environment:
    """The content of `mooring doctor`.

    Attributes:
        mooring: version and folder.
        python: version and system.
        torch: version, and whether it is new enough.
        devices: the devices to train on.
        extras: the extras of both distributions.
        data: the folder of each named image set; None if it was not downloaded.
        missing: what is missing, and the command that gets it.
    """

    mooring: dict[str, str]
    python: dict[str, str]
    torch: dict[str, Any]
    devices: tuple[dict[str, Any], ...]
    extras: tuple[Extra, ...]
    data: dict[str, str | None]
    missing: tuple[dict[str, str], ...]

    def __str__(self) -> str:
        lines = [f"mooring {self.mooring['version']} in {self.mooring['folder']}"]
        lines.append(f"python {self.python['version']} on {self.python['system']}")
        lines.append(f"torch {self.torch['version']}" + ("" if self.torch["ready"] else ": too old"))
        lines += [f"device {device['name']}: {device['what']}" for device in self.devices]
        states = {e.name: "ready" if e.ready else f"missing {', '.join(e.missing)}" for e in self.extras}
        lines += [f"extra {name}: {state}" for name, state in states.items()]
        lines += [f"data {name}: {folder or 'not fetched'}" for name, folder in self.data.items()]
        width = max((len(item["what"]) for item in self.missing), default=0)
        lines += ["to get what is missing:" if self.missing else "nothing is missing"]
        lines += [f"  {item['what']:<{width}}  {item['get']}" for item in self.missing]
        return "\n".join(lines)


def examine() -> Environment:
    """Collect the environment; nothing is changed, downloaded or installed.

    Example:
        >>> examine().mooring["version"] == mooring.__version__
        True
    """
    import torch

    requirements = _requirements()
    oldest = next((version for extra, name, version in requirements if name == "torch" and not extra), "")
    ready = _new_enough(torch.__version__, oldest)
    missing = [] if ready else [{"what": f"torch {oldest} or newer", "get": "pip install --upgrade torch"}]
    devices = [{"name": "cpu", "what": f"threads {torch.get_num_threads()}, cores {os.cpu_count()}"}]
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        devices.append({"name": f"cuda:{number}", "what": f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"})
    if len(devices) == 1 and Path("/dev/nvidia0").exists():
        get = "a torch with CUDA, see https://pytorch.org/get-started/locally"
        missing.append({"what": "a GPU is here that torch cannot use", "get": get})
    extras = [_extra(name, requirements) for name in dict.fromkeys(extra for extra, _, _ in requirements if extra)]
    missing += [{"what": f"extra {e.name}", "get": f'pip install "{e.name}"'} for e in extras if not e.ready]
    if not requirements:
        get = "pip install -e . -e laboratory in its checkout"
        missing.append({"what": "mooring is not installed, only importable", "get": get})
    data, commands = _data_sets()
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
    """Return (extra, library, oldest version) of each requirement on this Python, except those of `dev`."""
    requirements = []
    for distribution in DISTRIBUTIONS:
        try:
            lines = metadata.requires(distribution) or []
        except metadata.PackageNotFoundError:
            return []
        for line in lines:
            match = REQUIREMENT.match(line)
            assert match, line
            name, oldest, marker = match[1], match[2] or "", match[3] or ""
            below = re.search(r"python_version < '(\d+)\.(\d+)'", marker)
            if below and sys.version_info >= (int(below[1]), int(below[2])):
                continue
            extra = re.search(r"extra == '(\w+)'", marker)
            if extra is None or extra[1] != "dev":
                requirements.append((f"{distribution}[{extra[1]}]" if extra else "", name, oldest))
    return requirements


def _extra(name: str, requirements: list[tuple[str, str, str]]) -> Extra:
    libraries: dict[str, str | None] = {}
    missing = []
    for library, oldest in ((library, oldest) for extra, library, oldest in requirements if extra == name):
        try:
            libraries[library] = version = metadata.version(library)
        except metadata.PackageNotFoundError:
            libraries[library] = None
            missing.append(library)
            continue
        if not _new_enough(version, oldest):
            missing.append(f"{library} {oldest} or newer")
    return Extra(name, not missing, libraries, tuple(missing))


def _data_sets() -> tuple[dict[str, str | None], dict[str, str]]:
    """Return the folder of each named image set, and the command that gets it."""
    from mooring_lab.streams.named_datasets import NAMED_DATASETS, fetched_folder

    folders: dict[str, str | None] = {}
    for name, named in NAMED_DATASETS.items():
        folder = fetched_folder(named)
        folders[name] = str(folder) if folder else None
    get = {name: "info" if named.manual_steps else "fetch" for name, named in NAMED_DATASETS.items()}
    return folders, {name: f"mooring data {command} {name}" for name, command in get.items()}


def _new_enough(version: str, oldest: str) -> bool:
    parts = [[int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3]] for text in (version, oldest)]
    return parts[0] >= parts[1]
