"""Tests of the wheel and the source archive, also with nothing but torch installed."""

import json
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
    done = subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", folder], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return folder


@pytest.fixture(scope="module")
def bare(dist, tmp_path_factory):
    """Return a folder of libraries with the wheel, torch and its dependencies, and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    zipfile.ZipFile(next(dist.glob("*.whl"))).extractall(folder)
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


def test_wheel_has_every_module_and_nothing_else(dist):
    names = set(zipfile.ZipFile(next(dist.glob("*.whl"))).namelist())
    source = ROOT / "src"
    wanted = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    wanted = {name for name in wanted if "__pycache__" not in name}
    assert {name for name in names if ".dist-info/" not in name} == wanted
    assert "mooring/py.typed" in names


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
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
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


def test_core_works_with_torch_alone_and_the_command_says_what_to_install(bare):
    train = """
import torch, mooring
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
moor = mooring.attach(model, optimizer, importance="mas")
model(torch.ones(4, 3)).sum().backward(); optimizer.step(); moor.consolidate()
import importlib.util
print(mooring.__file__, moor.tasks, importlib.util.find_spec("typer"))
"""
    done = alone(bare, train)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(bare / "mooring" / "__init__.py"), "1", "None"]
    command = "from mooring_lab.cli import main; sys.exit(main(sys.argv[1:]))"
    done = alone(bare, command, "compare")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: the command line needs typer: pip install 'mooring[lab]'\n"
    error = alone(bare, "from mooring_lab import Study").stderr.splitlines()[-1]
    assert error.startswith("ModuleNotFoundError: the laboratory needs ")
    assert error.endswith(": pip install 'mooring[lab]'")
    report = json.loads(alone(bare, command, "doctor", "--json").stdout)
    extras = {extra["name"]: extra["ready"] for extra in report["extras"]}
    assert extras == dict.fromkeys(("docs", "lab", "lightning", "ray", "transformers"), False)


def test_importing_takes_less_than_150_ms_beyond_torch(bare):
    code = "import time, torch; began = time.process_time(); import mooring; mooring.attach"
    code += "; print(time.process_time() - began)"
    assert min(float(alone(bare, code).stdout) for _ in range(2)) < 0.15
