"""`mooring doctor` shows the environment; shells complete names."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import mooring
from mooring_lab.cli import environment, main

SRC = Path(mooring.__file__).parent.parent
REQUIRES = {
    "mooring": [
        "torch>=2.6",
        "numpy>=1.26; extra == 'transformers'",
        "tomli>=2; (python_version < '3.10') and extra == 'transformers'",
        "torch>=99.1; extra == 'future'",
        "pytest>=8; extra == 'dev'",
    ],
    "mooring-lab": ["mooring==0.1.0", "typer>=0.20", "nowhere-to-be-found>=3; extra == 'ray'"],
}


@pytest.fixture
def requirements(monkeypatch):
    monkeypatch.setattr(metadata, "requires", REQUIRES.__getitem__)


def test_missing_and_old_extras_have_an_install_command(requirements):
    examined = environment.examine()
    extras = {extra["name"]: extra for extra in examined["extras"]}
    # dev is for working on it; tomli is for older Pythons
    assert list(extras) == ["mooring[transformers]", "mooring[future]", "mooring-lab[ray]"]
    assert extras["mooring[transformers]"]["ready"]
    assert extras["mooring[transformers]"]["libraries"] == {"numpy": metadata.version("numpy")}
    assert extras["mooring-lab[ray]"]["missing"] == ["nowhere-to-be-found"]
    assert extras["mooring[future]"]["missing"] == ["torch 99.1 or newer"]
    commands = {item["what"]: item["get"] for item in examined["missing"]}
    assert commands["extra mooring-lab[ray]"] == 'pip install "mooring-lab[ray]"'
    assert "extra mooring[transformers]" not in commands


def test_downloaded_set_is_shown_with_its_folder(requirements, monkeypatch, tmp_path):
    monkeypatch.setenv("MOORING_DATA", str(tmp_path))
    (tmp_path / "cifar10").mkdir()
    examined = environment.examine()
    assert examined["data"]["cifar10"] == str(tmp_path / "cifar10")
    commands = {item["what"]: item["get"] for item in examined["missing"]}
    assert commands["data cifar100"] == "mooring data fetch cifar100"
    assert commands["data caltech256"] == "mooring data info caltech256"  # which is not on the Hub
    assert "data cifar10" not in commands


def test_json_and_text_have_the_same_content(requirements, capsys):
    assert main(["doctor", "--json"]) == 0
    examined = json.loads(capsys.readouterr().out)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert f"torch {examined['torch']['version']}" in text
    for item in examined["missing"]:
        assert item["get"] in text


def test_old_torch_exits_with_1(monkeypatch, capsys):
    monkeypatch.setattr(metadata, "requires", lambda name: ["torch>=99"])
    assert main(["doctor"]) == 1
    assert "pip install --upgrade torch" in capsys.readouterr().out


def test_checkout_that_is_not_installed_names_the_command(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert environment.examine()["missing"][0]["get"] == "pip install -e . -e laboratory in its checkout"


def test_shell_completes_the_last_name_of_a_list():
    words, wanted = "mooring compare --methods plain,explicit-m", "plain,explicit-mas"
    asked = {"_MOORING_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    environment = {**os.environ, **asked, "PYTHONPATH": str(SRC)}
    done = subprocess.run([sys.executable, "-m", "mooring_lab"], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == [wanted], done.stderr
