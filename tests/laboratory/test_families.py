"""The folder of a family of methods can be deleted: everything else still imports, lists and runs."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mooring
import mooring_lab
from mooring_lab.methods.registry import FAMILIES

ROOT = Path(mooring_lab.__file__).parent
METHODS = ROOT / "methods"

RUN = """
import pkgutil, sys
import mooring_lab
for module in pkgutil.walk_packages(mooring_lab.__path__, "mooring_lab."):
    if "kernels" not in module.name and not module.name.endswith(("__main__", "ray", "worker")):
        __import__(module.name)
from mooring_lab.cli import main
from mooring_lab.methods import METHODS, resolve_methods
from mooring_lab.methods.groups import GROUPS
from mooring_lab.fleet.fleet import Fleet
from mooring_lab.model.spec import RunSpec
from mooring_lab.streams import by_class, digits
from mooring_lab.streams.slices import limit_images, select_tasks

assert mooring_lab.__file__.startswith(sys.argv[1]), mooring_lab.__file__
assert main(["methods"]) == 0
stream = limit_images(select_tasks(by_class(digits(), 2), 0, 2), 20)
for name in {name for group in GROUPS for name in resolve_methods(group)}:
    assert name in METHODS
for name in sys.argv[2:]:
    method = METHODS[name]
    spec = RunSpec("digits", stream.fingerprint, name, 0, strength=method.strength, memory=method.memory, epochs=1)
    print([result.status for result in Fleet([spec], stream).run()])
"""


def test_every_folder_has_one_line_in_the_registry():
    folders = {path.parent.name for path in METHODS.glob("*/__init__.py")}
    assert sorted(FAMILIES) == sorted(folders)
    registry = (METHODS / "registry.py").read_text()
    assert all(registry.count(f'"{name}"') == 1 for name in FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_module_outside_a_family_names_it(family):
    pattern = re.compile(rf"mooring_lab\.methods\.{family}\b|mooring_lab\.methods import .*\b{family}\b")
    users = [path for path in ROOT.rglob("*.py") if pattern.search(path.read_text())]
    assert not [path for path in users if path.parent != METHODS / family]


@pytest.mark.parametrize(
    ("family", "others"),
    [
        ("replay", ("mir", "der++", "tpgm")),
        ("penalties", ("explicit-ewc", "laplace-kronecker")),
        ("budgets", ("budget-kronecker",)),
    ],
)
def test_the_laboratory_runs_without_the_folder_of_a_family(family, others, tmp_path):
    package = tmp_path / "mooring_lab"
    for folder in (ROOT, Path(mooring.__file__).parent):
        shutil.copytree(folder, tmp_path / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(package / "methods" / family)
    registry = package / "methods" / "registry.py"
    registry.write_text(registry.read_text().replace(f'    "{family}",\n', ""))
    command = [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{RUN}"]
    command += [str(tmp_path), *others]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-len(others) :] == ["['finished']"] * len(others)
