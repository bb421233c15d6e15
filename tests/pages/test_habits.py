"""Tests of the project's habits: decision records, the glossary, hosted CI, hooks and the citation file."""

import re
import sys
from html import unescape
from pathlib import Path

import pytest

import mooring

yaml = pytest.importorskip("yaml")
tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")

ROOT = Path(__file__).parents[2]
DECISIONS = ROOT / "docs" / "decisions"
RECORDS = sorted(path.name for path in DECISIONS.glob("[0-9]*.md"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())


def version(text):
    """Return a version as numbers, which sort as versions do."""
    return tuple(int(part) for part in text.split("."))


def nav_pages(entry):
    """Return every page below an entry of the site's navigation."""
    if isinstance(entry, str):
        return [entry]
    children = entry.values() if isinstance(entry, dict) else entry
    return [page for child in children for page in nav_pages(child)]


def test_decision_records_are_numbered_without_gaps():
    assert [int(name[:4]) for name in RECORDS] == list(range(1, len(RECORDS) + 1))


@pytest.mark.parametrize("name", RECORDS)
def test_decision_record_has_every_part_and_is_in_the_index_and_the_navigation(name):
    text = (DECISIONS / name).read_text()
    assert text.startswith(f"# {int(name[:4])}. ")
    assert "\n**Status:** " in text
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings == ["Context", "Decision", "Consequences", "Measured", "Alternatives"]
    assert f"]({name})" in (DECISIONS / "index.md").read_text()
    assert f"decisions/{name}" in nav_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])


@pytest.mark.parametrize("page", ["glossary.md", "where-to-put.md", *(f"decisions/{name}" for name in RECORDS)])
def test_page_names_files_that_exist(page):
    if not (ROOT / "src").is_dir():
        pytest.skip("there is no source tree here")
    paths = re.findall(r"`((?:src|tests|benchmarks)/[\w/.]+)`", (ROOT / "docs" / page).read_text())
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_hosted_ci_tests_the_oldest_and_the_newest_declared_versions():
    declared = [re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line) for line in PROJECT["classifiers"]]
    pythons = sorted((match[1] for match in declared if match), key=version)
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    [torch] = PROJECT["dependencies"]
    oldest = re.fullmatch(r"torch>=([\d.]+)", torch)[1]
    matrix = WORKFLOW["jobs"]["versions"]["strategy"]["matrix"]
    assert matrix["python"] == [pythons[0], pythons[-1]]
    assert matrix["torch"] == [f"torch=={oldest}.*", torch]  # pip takes the newest that the second one allows


def test_hosted_ci_runs_the_whole_check_with_pinned_versions_and_the_fault_tests_every_week():
    commands = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in WORKFLOW["jobs"].items()}
    assert commands["pinned"] == ["make test"]
    assert commands["faults"] == ["make test-faults"]
    triggers = WORKFLOW[True]  # YAML 1.1 reads the key `on` as a truth value
    assert triggers["schedule"][0]["cron"].split()[-1] in "0123456"
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = re.findall(r"\bmake ([\w-]+)", "\n".join(line for lines in commands.values() for line in lines))
    assert set(used) <= targets
    assert all(job["timeout-minutes"] for job in WORKFLOW["jobs"].values())


def test_commit_hooks_run_what_make_test_runs():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    [repository] = config["repos"]
    assert repository["repo"] == "local"
    entries = [hook["entry"].removeprefix(".venv/bin/").split(" --")[0] for hook in repository["hooks"]]
    makefile = (ROOT / "Makefile").read_text()
    assert entries == ["ruff check", "ruff format", "mypy"]
    assert all(f"$(BIN)/{entry}" in makefile for entry in entries)


def test_issue_forms_parse_and_the_bug_report_asks_for_doctor_output():
    folder = ROOT / ".github" / "ISSUE_TEMPLATE"
    forms = {path.stem: yaml.safe_load(path.read_text()) for path in folder.glob("*.yml")}
    assert set(forms) == {"bug_report", "feature_request", "config"}
    fields = {field["id"]: field for field in forms["bug_report"]["body"]}
    assert "mooring doctor" in fields["doctor"]["attributes"]["label"]
    assert fields["doctor"]["validations"]["required"]


def test_citation_names_the_version_of_the_package_and_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == mooring.__version__
    assert citation["license"] == PROJECT["license"]
    [paper] = citation["references"]
    assert [author["family-names"] for author in paper["authors"]] == ["Lubana", "Trivedi", "Koutra", "Dick"]
    assert paper["url"] in (ROOT / "README.md").read_text()


def test_badges_show_what_the_project_declares():
    folder = ROOT / "docs" / "assets" / "badges"
    shown = {path.stem: re.findall(r"<title>(.+)</title>", path.read_text())[0] for path in folder.glob("*.svg")}
    torch = next(name for name in PROJECT["dependencies"] if name.startswith("torch"))
    assert {name: unescape(title) for name, title in shown.items()} == {
        "version": f"version: {mooring.__version__}",
        "python": f"python: {PROJECT['requires-python']}",
        "torch": f"torch: {torch.removeprefix('torch')}",
        "license": f"license: {PROJECT['license']}",
    }


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "CONTRIBUTING.md"])
def test_page_shows_no_picture_from_the_network(page):
    text = (ROOT / page).read_text()
    assert not re.findall(r"!\[[^\]]*\]\(\s*(?:https?:)?//|<img[^>]+src=[\"']?(?:https?:)?//", text)
