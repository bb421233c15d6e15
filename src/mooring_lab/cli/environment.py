"""The environment that `mooring doctor` shows: Python, torch, devices, extras and data sets."""

import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import mooring

DISTRIBUTIONS = ("mooring", "mooring-lab")
"""The distributions whose requirements are examined."""

REQUIREMENT = re.compile(r"^([\w.-]+)[^;>]*(?:>=([\d.]+))?[^;]*(?:;(.*))?$")


def examine() -> dict[str, Any]:
    """Return the environment as plain values; nothing is changed, downloaded or installed.

    The entries are "mooring" (version and folder), "python" (version and system), "torch" (version, and whether it is
    new enough), "devices", "extras" (of both distributions, each with the installed versions of its libraries), "data"
    (the folder of each named image set, None if it was not downloaded), and "missing" (with the command that gets it).

    Example:
        >>> examine()["mooring"]["version"] == mooring.__version__
        True
    """
    import torch

    from mooring_lab.streams.named_datasets import NAMED_DATASETS, fetched_folder  # its package imports torch

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
    missing += [{"what": f"extra {e['name']}", "get": f'pip install "{e["name"]}"'} for e in extras if e["missing"]]
    if not requirements:
        get = "pip install -e . -e laboratory in its checkout"
        missing.append({"what": "mooring is not installed, only importable", "get": get})
    data = {}
    for name, named in NAMED_DATASETS.items():
        data[name] = str(folder) if (folder := fetched_folder(named)) else None
        get = f"mooring data {'info' if named.manual_steps else 'fetch'} {name}"
        missing += [] if folder else [{"what": f"data {name}", "get": get}]
    return {
        "mooring": {"version": mooring.__version__, "folder": str(Path(mooring.__file__).parent)},
        "python": {"version": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"},
        "torch": {"version": torch.__version__, "ready": ready, "cuda": torch.version.cuda},
        "devices": devices,
        "extras": extras,
        "data": data,
        "missing": missing,
    }


def as_text(environment: dict[str, Any]) -> str:
    """Return an environment as lines."""
    versions, missing = environment["torch"], environment["missing"]
    lines = [f"mooring {environment['mooring']['version']} in {environment['mooring']['folder']}"]
    lines.append(f"python {environment['python']['version']} on {environment['python']['system']}")
    lines.append(f"torch {versions['version']}" + ("" if versions["ready"] else ": too old"))
    lines += [f"device {device['name']}: {device['what']}" for device in environment["devices"]]
    for extra in environment["extras"]:
        lines.append(
            f"extra {extra['name']}: " + (f"missing {', '.join(extra['missing'])}" if extra["missing"] else "ready")
        )
    lines += [f"data {name}: {folder or 'not fetched'}" for name, folder in environment["data"].items()]
    width = max((len(item["what"]) for item in missing), default=0)
    lines += ["to get what is missing:" if missing else "nothing is missing"]
    return "\n".join([*lines, *(f"  {item['what']:<{width}}  {item['get']}" for item in missing)])


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


def _extra(name: str, requirements: list[tuple[str, str, str]]) -> dict[str, Any]:
    """Return the installed version of each library of an extra, and those that are missing or too old."""
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
    return {"name": name, "ready": not missing, "libraries": libraries, "missing": missing}


def _new_enough(version: str, oldest: str) -> bool:
    parts = [[int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3]] for text in (version, oldest)]
    return parts[0] >= parts[1]
