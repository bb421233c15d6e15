"""Tests of both wheels and the source archive, and of the library with nothing but torch installed."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from importlib import metadata
from pathlib import Path

import pytest

import mooring

ROOT = Path(__file__).parent.parent

pytest.importorskip("hatchling")
if not (ROOT / "src").is_dir():
    pytest.skip("there is no source to build from", allow_module_level=True)


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    for source, targets in ((ROOT, ()), (ROOT / "laboratory", ("-t", "wheel"))):
        command = [sys.executable, "-m", "hatchling", "build", "-d", folder, *targets]
        done = subprocess.run(command, cwd=source, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
    return folder


def wheel_of(dist, name):
    """Return the wheel of a distribution."""
    return next(dist.glob(f"{name}-{mooring.__version__}-*.whl"))


@pytest.fixture(scope="module")
def bare(dist, tmp_path_factory):
    """Return a folder of libraries with the wheel, torch and its dependencies, and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    zipfile.ZipFile(wheel_of(dist, "mooring")).extractall(folder)
    waiting, seen = ["torch"], set()
    while waiting:
        name = waiting.pop().lower()
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # for another system
        if name in seen:
            continue
        seen.add(name)
        for part in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (folder / part).exists():
                (folder / part).symlink_to(Path(distribution.locate_file(part)))
        waiting += [re.match(r"[\w.-]+", line)[0] for line in distribution.requires or () if "extra ==" not in line]
    return folder


def alone(bare, *arguments):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    code = f"import sys, site; sys.path.append({str(bare)!r}); site.addsitedir({str(bare)!r}); exec(sys.argv.pop(1))"
    command = [sys.executable, "-S", "-W", "ignore", "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=bare, timeout=120)


@pytest.mark.parametrize(
    ("name", "packages"), [("mooring", {"mooring"}), ("mooring_lab", {"mooring_lab", "mooring_paper"})]
)
def test_wheel_has_every_module_of_its_packages_and_nothing_else(dist, name, packages):
    names = {name for name in zipfile.ZipFile(wheel_of(dist, name)).namelist() if ".dist-info/" not in name}
    source = ROOT / "src"
    files = {path.relative_to(source) for path in source.rglob("*") if path.is_file()}
    wanted = {path for path in files if "__pycache__" not in path.parts and path.parts[0] in packages}
    assert names == {path.as_posix() for path in wanted}
    assert f"{name}/py.typed" in names


def test_laboratory_requires_the_library_of_its_version_and_brings_the_command(dist):
    with zipfile.ZipFile(wheel_of(dist, "mooring_lab")) as wheel:
        folder = f"mooring_lab-{mooring.__version__}.dist-info"
        described = message_from_bytes(wheel.read(f"{folder}/METADATA"))
        commands = wheel.read(f"{folder}/entry_points.txt").decode()
    assert f"mooring=={mooring.__version__}" in described.get_all("Requires-Dist")
    assert commands.split() == ["[console_scripts]", "mooring", "=", "mooring_lab.cli:main"]


def test_source_archive_has_tests_and_documents(dist):
    name = f"mooring-{mooring.__version__}"
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        files = set(archive.getnames())
    documents = ("docs/index.md", "mkdocs.yml", "examples/study.toml", "Makefile")
    for path in (*documents, "LICENSE", "CITATION.cff", "SECURITY.md", "CHANGELOG.md"):
        assert f"{name}/{path}" in files, path
    tests = {path for path in (ROOT / "tests").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {f"{name}/{path.relative_to(ROOT).as_posix()}" for path in tests} <= files


def test_wheel_carries_its_licence_and_description(dist):
    with zipfile.ZipFile(wheel_of(dist, "mooring")) as wheel:
        folder = f"mooring-{mooring.__version__}.dist-info"
        described = message_from_bytes(wheel.read(f"{folder}/METADATA"))
        licence = wheel.read(f"{folder}/licenses/LICENSE").decode()
    assert licence == (ROOT / "LICENSE").read_text()
    assert described["License-Expression"] == "MIT"
    assert described.get_payload(decode=True).decode() == (ROOT / "README.md").read_text()


def test_version_is_the_same_everywhere(dist):
    assert {path.name.split("-")[1].removesuffix(".tar.gz") for path in dist.iterdir()} == {mooring.__version__}
    headings = re.findall(r"^## (?:Unreleased: )?([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == mooring.__version__


def test_library_works_with_torch_alone_and_brings_no_laboratory(bare):
    train = """
import torch, mooring
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
moor = mooring.attach(model, optimizer, importance="mas")
model(torch.ones(4, 3)).sum().backward(); optimizer.step(); moor.consolidate()
from importlib.util import find_spec
print(mooring.__file__, moor.tasks, *(find_spec(name) for name in ("typer", "mooring_lab", "mooring_paper")))
"""
    done = alone(bare, train)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(bare / "mooring" / "__init__.py"), "1", "None", "None", "None"]


def test_importing_takes_less_than_150_ms_beyond_torch(bare):
    code = "import time, torch; began = time.process_time(); import mooring; mooring.attach"
    code += "; print(time.process_time() - began)"
    assert min(float(alone(bare, code).stdout) for _ in range(2)) < 0.15
