"""Commands that train nothing start without torch, and only `mooring paper` imports the reproduction of the paper."""

import json
import os
import subprocess
import sys

import pytest

from mooring_lab.cli.app import COMMANDS
from mooring_lab.methods import METHODS

RUN = """
import json, sys
from mooring_lab.cli import main
try:
    status = main(json.loads(sys.argv[1]))
except SystemExit as stopped:  # shell completion
    status = stopped.code or 0
heavy = ["torch", "numpy", "scipy", "matplotlib", "mooring.attach", "mooring_paper"]
print("STATUS", status, *(name for name in heavy if name in sys.modules), file=sys.stderr)
"""


def run(*words: str, **variables: str) -> tuple[str, list[str]]:
    """Run a command in a fresh process; return stdout, and the exit status followed by the heavy modules it loaded."""
    environment = {**os.environ, "COLUMNS": "200", **variables}
    command = [sys.executable, "-c", RUN, json.dumps(words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return done.stdout, done.stderr.splitlines()[-1].split()[1:]


def complete(line: str) -> tuple[list[str], list[str]]:
    variables = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    out, loaded = run(_MOORING_COMPLETE="complete_bash", **variables)
    return out.split(), loaded


def test_help_lists_every_command_with_its_whole_help_line_without_torch():
    out, loaded = run("--help")
    assert loaded == ["0"]
    lines = [" ".join(line.strip("│ ").split()) for line in out.splitlines()]
    for name, (_, line) in COMMANDS.items():
        assert f"{name} {line}" in lines


def test_version_is_printed_without_torch():
    out, loaded = run("--version")
    assert out.strip()[0].isdecimal()
    assert loaded == ["0"]


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_methods_are_listed_without_torch(options):
    out, loaded = run("methods", *options)
    assert loaded == ["0"]
    if options:
        assert [method["name"] for method in json.loads(out)] == list(METHODS)
    else:
        listed = [line.split()[0] for line in out.splitlines() if line and line.split()[0] in METHODS]
        assert sorted(listed) == sorted(METHODS)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "paper"])
def test_help_of_a_command_starts_with_its_line_and_imports_no_torch(name):
    out, loaded = run(name, "--help")
    assert loaded == ["0"]
    assert COMMANDS[name][1] in out


def test_shells_complete_commands_without_torch():
    assert complete("mooring me") == (["methods"], ["0"])


@pytest.mark.parametrize("command", ["compare", "tune", "frontier"])
def test_shells_complete_method_names_without_torch(command):
    assert complete(f"mooring {command} --methods plain,explicit-m") == (["plain,explicit-mas"], ["0"])


@pytest.mark.faults  # slow
def test_compare_does_not_import_the_paper(tmp_path):
    study = str(tmp_path / "study.sqlite")
    words = ["compare", "--limit", "20", "--tasks", "2", "--epochs", "1", "--seeds", "1", "--methods", "plain"]
    out, loaded = run(*words, "--study", study)
    assert f"results: {study}" in out
    assert loaded[0] == "0"
    assert "torch" in loaded
    assert "mooring_paper" not in loaded


def test_public_names_are_imported_on_first_use():
    code = """
import sys, mooring
assert "torch" not in sys.modules
assert set(mooring.__all__) <= set(dir(mooring)) and {"Memory", "Random", "drift", "stability"} <= set(dir(mooring))
import mooring.integrations.deferred_attach  # imports the module that defines `attach`
assert callable(mooring.attach) and mooring.attach.__name__ == "attach"
from mooring import *
assert all(globals()[name] is getattr(mooring, name) for name in mooring.__all__)
assert not hasattr(mooring, "nowhere")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "code",
    [
        "import mooring; module = mooring.stability",
        "from mooring import stability as module",
        "from mooring.diagnose import stability as first; import mooring; module = mooring.stability; assert first",
    ],
)
def test_stability_is_one_module_under_both_names(code):
    check = "from mooring.diagnose import stability; assert module is stability; assert module.verdicts"
    subprocess.run([sys.executable, "-c", f"import sys; {code}; {check}"], check=True)


def test_a_missing_library_is_one_line():
    code = """
import sys
sys.modules["scipy"] = None
from mooring_lab.cli import main
sys.exit(main(["compare"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: this command needs scipy: pip install 'mooring[lab]'\n"
