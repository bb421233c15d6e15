"""README and examples tell the truth: their code runs, their links lead somewhere."""

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from mooring.lab.comparison import comparison
from mooring.lab.methods import METHODS
from mooring.lab.streams.options import StreamOptions
from mooring.lab.study_file import METHOD, TOP, TUNE, read_study_file
from mooring.lab.training import Training, defaults

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("**/*.md")),
]


ELSEWHERE = {"integrations.md", "distributed.md"}  # in the tests' folders of that name, with libraries and ranks


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if d.name not in ELSEWHERE], ids=lambda path: path.name)
def test_every_python_block_runs(document, tmp_path):
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)):
        script = tmp_path / f"block{number}.py"
        script.write_text(block)
        subprocess.run([sys.executable, "-W", "error", script], check=True, timeout=120, cwd=tmp_path)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_inside_resolves(document):
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def run(*command):
    done = subprocess.run(
        [sys.executable, "-W", "error", *command], check=True, timeout=240, capture_output=True, text=True
    )
    return done.stdout


def test_the_demo_shows_less_forgetting_with_the_explicit_step():
    table = run(ROOT / "examples" / "digits.py", "--seeds", "2")
    forgotten = {line[:26].strip(): float(line[50:].split()[0]) for line in table.splitlines()[2:]}
    assert len(forgotten) == 5
    assert forgotten["plain fine-tuning"] > 5
    assert forgotten["EWC, the explicit step"] < 0.3 * forgotten["plain fine-tuning"]
    assert forgotten["MAS, the explicit step"] < 0.3 * forgotten["plain fine-tuning"]


def test_the_explosion_happens_and_every_piece_of_advice_cures_it():
    lines = run(ROOT / "examples" / "why_it_explodes.py").splitlines()
    assert "stopped after" in lines[0]
    assert sum(": trained, pull energy" in line for line in lines) == 4


def test_the_readme_shows_the_fine_tuning_example_whole_and_what_it_prints():
    file, readme = ROOT / "examples" / "finetune.py", (ROOT / "README.md").read_text()
    code = file.read_text()
    assert f"```python\n{code[code.index('import torch') :]}```" in readme
    for line in run(file).splitlines():
        name, old, new = line.split()[0], *(float(each) for each in re.findall(r"([\d.]+) %", line))
        shown = re.search(rf"^{name} \['([\d.]+) %', '([\d.]+) %'\]$", readme, re.MULTILINE)
        assert shown
        assert [old, new] == pytest.approx([float(each) for each in shown.groups()], abs=5)  # rounding differs


def test_the_language_model_is_fine_tuned_in_miniature(tmp_path):
    script, out = ROOT / "examples" / "finetune_language_model.py", tmp_path / "out.json"
    methods = ["plain", "L2-SP 1", "Kronecker 0.1, own text"]
    command = [script, tmp_path / "cache", "--size", "tiny", "--json", out, "--figure", tmp_path / "out.png"]
    table = run(*command, "--methods", *methods)
    found = json.loads(out.read_text())["runs"]
    assert [each["method"] for each in found] == methods
    assert all(f"{each['curve'][-1]['prose']:.3f}" in table for each in found)
    prose = [each["curve"][-1]["prose"] for each in found]
    assert prose[0] < found[0]["curve"][0]["prose"]  # plain fine-tuning learns
    assert (tmp_path / "out.png").stat().st_size > 10_000
    again = run(*command, "--methods", "plain")  # from the model that was kept
    assert again.splitlines()[-1][:58] == table.splitlines()[3][:58]


def test_the_benchmark_prints_ratios():
    options = ["--model", "cnn6", "--importance", "uniform", "--pull", "proximal", "--turns", "2"]
    table = run(ROOT / "benchmarks" / "overhead.py", *options)
    assert re.search(r"uniform +proximal +\d\.\d{3}", table)


def test_the_fleet_benchmark_prints_ratios():
    table = run(ROOT / "benchmarks" / "fleet.py", "--runs", "3", "--repeats", "1")
    assert re.search(r"explicit-ewc +\d+\.\d us +\d+\.\d us +\d+\.\d", table)


def test_the_study_file_in_the_documents_is_one_and_shows_every_key(tmp_path):
    block = re.search(r"```toml\n(.*?)```", (ROOT / "docs" / "studies.md").read_text(), re.DOTALL)
    assert block
    study = tmp_path / "study.toml"
    study.write_text(block[1])
    told = read_study_file(study)
    assert len(comparison(**told.comparison).specs(defaults("digits"), "", "", "")) == 25
    keys = {each.name for kind in (StreamOptions, Training) for each in fields(kind)} - {"paper"}
    for key in keys | {*TOP, *TUNE, *METHOD} - {"stream", "train", "method", "tune"}:
        assert re.search(rf"^(# )?{key} = ", block[1], re.MULTILINE), key


def test_the_readme_shows_what_the_demo_compares():
    text = (ROOT / "README.md").read_text()
    assert f"{len(METHODS)} methods" in text
    assert "mooring compare --stream digits --methods all --seeds 5" in (ROOT / "Makefile").read_text()


def test_the_paper_in_one_file_runs_in_miniature(tmp_path):
    study = str(tmp_path / "paper.sqlite")
    table = run(ROOT / "examples" / "paper_in_one_file.py", "--stream", "digits", "--seeds", "2", "--study", study)
    assert "52 settings searched" in table
    assert len(re.findall(r"^explicit-\w+ .* lr 0\.0\d", table, re.MULTILINE)) == 4
