"""Tests of documents and examples: code runs, commands and options exist, links resolve, numbers name commands."""

import json
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import warnings
from dataclasses import fields
from inspect import Parameter, signature
from pathlib import Path

import pytest
import torch
import typer.main

import mooring
from mooring import rules
from mooring_lab.cli.app import app
from mooring_lab.methods import METHODS
from mooring_lab.model.training import Training, default_training
from mooring_lab.streams.options import StreamOptions
from mooring_lab.study.comparison import comparison
from mooring_lab.study.study import Study
from mooring_lab.study.study_file import METHOD_KEYS, TOP_KEYS, TUNE_ARGUMENTS, read_study_file
from processes import Child

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").glob("**/*.md")),
]


ELSEWHERE = {"integrations.md", "distributed.md"}  # tested in tests/library/integrations and tests/library/distributed
WITH_BLOCKS = [d for d in DOCUMENTS if d.name not in ELSEWHERE and d.parent.name != "recipes"]  # see test_recipes.py


@pytest.mark.parametrize("document", WITH_BLOCKS, ids=lambda path: path.name)
def test_every_python_block_runs(document, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)
    example = (ROOT / "examples" / "finetune.py").read_text()  # tested below, as are its results
    blocks = [
        block for block in blocks if "from trl" not in block and block not in example
    ]  # TRL in tests/library/adapters
    if blocks:
        finished = Child(tmp_path, executed, blocks, patience=240).ended()
        assert finished.status == 0, f"{finished.out}\n{finished.err}"


def executed(blocks):
    """Run blocks of code in a child process, each in its own namespace."""
    warnings.simplefilter("error")
    for block in blocks:
        print(block)
        exec(block, {"__name__": "__main__"})


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_internal_link_resolves(document):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", document.read_text()):
        if "://" not in target:
            there = document.parent / target if target else document
            assert there.exists(), f"{document.name} links to {target}"
            if anchor and there.suffix == ".md":
                headings = re.findall(r"^#+ (.+)$", there.read_text(), re.MULTILINE)
                assert anchor in {slug(heading) for heading in headings}, f"{document.name} links to {target}#{anchor}"


def slug(heading):
    """Return the anchor of a heading, on GitHub and on the site."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower())).strip()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_number_is_next_to_the_command_that_produced_it(document):
    text = document.read_text()
    figures = re.findall(r"!\[(.*?)\]\((.*?)\)", text)
    commands = re.findall(r"(?:mooring (?:paper|frontier|compare|report)|python (?:benchmarks|examples|docs)/\w)", text)
    for words, file in figures:
        assert words, f"{file} has no words for who cannot see it"
        assert commands, f"{document.name} shows {file} and no command"


def commands_in(text):
    """Return the command lines in code blocks without a language and in backticks; continued lines are joined."""
    blocks = [
        block for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE) if not language
    ]
    lines = [line for block in blocks for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    lines += re.findall(r"`((?:mooring|python) [^`\n]+)`", text)
    for line in lines:
        whole = re.match(r"(\$ )?(mooring|python) \S", line) and not any(sign in line for sign in ("...", " | ", "["))
        if whole and "--install-completion" not in line:  # it would exit at once
            yield shlex.split(line.removeprefix("$ "), comments=True)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_documented_command_and_option_exists(document):
    for words in commands_in(document.read_text()):
        if words[0] == "mooring":
            parsed(typer.main.get_command(app), words)
        elif words[1] == "-m":
            assert all((ROOT / word).exists() for word in words[3:] if not word.startswith("-")), words
        else:
            script = ROOT / words[1]
            assert script.is_file(), words
            imported = re.findall(r"^from (\w+) import", script.read_text(), re.MULTILINE)  # such as a parser
            files = [script, *script.parent.glob("*/*.py"), *(script.parent / f"{name}.py" for name in imported)]
            code = "".join(path.read_text() for path in files if path.is_file())
            for option in (word for word in words[2:] if word.startswith("--")):
                assert f'"{option}"' in code, f"{words[1]} has no {option}"


def parsed(command, words):
    """Parse the words of a command without running it; the parser raises an error on an unknown word."""
    if len(words) > 1:
        context = command.make_context(words[0], words[1:])
        if hasattr(command, "commands") and (arguments := [*context._protected_args, *context.args]):
            _, inner, _ = command.resolve_command(context, arguments)
            parsed(inner, arguments)


def run(*command, strict=True, **options):
    if isinstance(command[0], Path) and command[0].parent.name == "examples" and not options:
        with tempfile.TemporaryDirectory() as folder:
            finished = Child(Path(folder), script, strict, *map(str, command), patience=240).ended()
        assert finished.status == 0, finished.err
        return finished.out
    command = [sys.executable, *(["-W", "error"] if strict else []), *command]
    return subprocess.run(command, check=True, timeout=240, capture_output=True, text=True, **options).stdout


def script(strict, *words):
    """Run an example in a child process as `python WORDS` does."""
    if strict:
        warnings.simplefilter("error")
    sys.argv, sys.path[0] = list(words), str(Path(words[0]).parent)
    runpy.run_path(words[0], run_name="__main__")


@pytest.mark.faults  # slow
def test_demo_shows_less_forgetting_with_interpolation():
    table = run(ROOT / "examples" / "digits.py", "--seeds", "1")
    forgotten = {line[:26].strip(): float(line[50:].split()[0]) for line in table.splitlines()[2:]}
    assert len(forgotten) == 5
    assert forgotten["plain fine-tuning"] > 5
    assert forgotten["EWC, the explicit step"] < 0.3 * forgotten["plain fine-tuning"]
    assert forgotten["MAS, the explicit step"] < 0.3 * forgotten["plain fine-tuning"]


def test_penalty_example_explodes_and_every_advice_prevents_it():
    lines = run(ROOT / "examples" / "why_it_explodes.py").splitlines()
    assert "stopped after" in lines[0]
    assert sum(": trained, pull energy" in line for line in lines) == 4


def test_readme_and_home_page_contain_the_fine_tuning_example_and_its_output(tmp_path):
    file, pages = ROOT / "examples" / "finetune.py", [ROOT / "README.md", ROOT / "docs" / "index.md"]
    code = file.read_text()
    (tmp_path / "plain.py").write_text("".join(line for line in code.splitlines(True) if "moor" not in line))
    printed = run(file).splitlines()
    plain = run(tmp_path / "plain.py").splitlines()
    assert len(printed) == 3
    for page in pages:
        text = page.read_text()
        assert f"```python\n{code[code.index('import torch') :]}```" in text
        shown = re.search(r"```\n(before: .*?)```", text, re.DOTALL)[1].splitlines()
        assert percents(printed[0]) == pytest.approx(percents(shown[0]), abs=5)  # rounding differs
        assert percents(printed[2]) == pytest.approx(percents(shown[2]), abs=5)
        assert float(printed[1].split()[1]) <= 0.1
        assert percents(plain[1]) == pytest.approx(percents(re.search(r"the last line is `(.*?)`", text)[1]), abs=5)


def percents(line):
    return [float(percent) for percent in re.findall(r"([\d.]+)%", line)]


def test_home_page_says_the_same_as_the_readme():
    readme, home = ((ROOT / name).read_text().split("Python 3.10")[0] for name in ("README.md", "docs/index.md"))
    assert readme.replace("](docs/", "](") == home


def test_home_page_fits_above_the_fold():
    prose = re.sub(r"```.*?```", "", (ROOT / "README.md").read_text().split("## Install")[0], flags=re.DOTALL)
    assert len(prose.split()) < 300


def test_choices_name_figures_of_the_pages_that_they_link_to():
    """Each row of a table of docs/choose.md with percents or nats has them in a page that it names."""
    text = (ROOT / "docs" / "choose.md").read_text()
    for row in re.findall(r"^\|.*\[[\w ]+\]\([\w-]+\.md.*$", text, re.MULTILINE):
        pages = [(ROOT / "docs" / name).read_text() for name in re.findall(r"\]\(([\w-]+\.md)", row)]
        figures = re.findall(r"\b\d+\.\d+\b", re.sub(r"`[^`]*`|\([^)]*\)", "", row))
        for figure in figures:
            assert any(re.search(rf"\b{re.escape(figure)}", page) for page in pages), (row, figure)


@pytest.mark.faults  # slow
def test_language_model_example_runs_in_miniature(tmp_path):
    script, out = ROOT / "examples" / "finetune_language_model.py", tmp_path / "out.json"
    methods = ["plain", "L2-SP 1", "Kronecker 0.1, own text"]
    command = [script, tmp_path / "cache", "--size", "tiny", "--json", out, "--figure", tmp_path / "out.png"]
    table = run(*command, "--methods", *methods)
    runs = json.loads(out.read_text())["runs"]
    assert [run["method"] for run in runs] == methods
    assert all(f"{run['curve'][-1]['prose']:.3f}" in table for run in runs)
    prose = [run["curve"][-1]["prose"] for run in runs]
    assert prose[0] < runs[0]["curve"][0]["prose"]  # plain fine-tuning learns
    assert (tmp_path / "out.png").stat().st_size > 10_000
    again = run(*command, "--methods", "plain")  # starts from the saved model
    assert again.splitlines()[-1][:58] == table.splitlines()[3][:58]


@pytest.mark.faults  # slow
def test_overhead_benchmark_prints_ratios():
    options = ["--model", "cnn6", "--importance", "uniform", "--pull", "proximal", "--turns", "2"]
    table = run(ROOT / "benchmarks" / "overhead.py", *options, "--no-memory")
    assert re.search(r"uniform +proximal +\d\.\d{3}", table)


NAMES_OF_COSTS = {
    "efficientnet": "EfficientNet-Lite0",
    "gpt2": "GPT-2",
    "gpt2-lora": "GPT-2, LoRA",
    "llama-1b": "Llama 1.1 B",
    "llama-1b-lora": "Llama 1.1 B, LoRA",
    "llama-7b": "Llama 6.7 B",
    "llama-7b-lora": "Llama 6.7 B, LoRA",
    "many-tensors": "2,000 tensors",
}


@pytest.mark.parametrize("file", sorted((ROOT / "docs" / "figures" / "finetuning-cost").glob("*.json")), ids=str)
def test_tables_of_fine_tuning_costs_are_those_of_the_results(file):
    """Each row of the results is in both documents, with the figures that the benchmark prints."""
    overhead, memory = ((ROOT / "docs" / name).read_text() for name in ("overhead.md", "memory.md"))
    for model in json.loads(file.read_text())["models"]:
        for row in model["rows"]:
            low, high = row["quartiles"]
            cells = f"| {row['step_ratio']:.3f} | {low:.3f} to {high:.3f} | {row['attach_steps']:.0f} |"
            assert any(cells in line and NAMES_OF_COSTS[model["model"]] in line for line in overhead.splitlines()), (
                cells
            )
            peaks = f"| {row['attach_peak_ratio']:.2f} | {row['moored_peak_ratio']:.2f} |"
            assert any(peaks in line and NAMES_OF_COSTS[model["model"]] in line for line in memory.splitlines()), peaks


@pytest.mark.faults  # slow
def test_fleet_benchmark_prints_ratios():
    table = run(ROOT / "benchmarks" / "fleet.py", "--runs", "3", "--repeats", "1")
    assert re.search(r"explicit-ewc +\d+\.\d us +\d+\.\d us +\d+\.\d", table)


def test_example_prints_help_without_running():
    output = run(ROOT / "examples" / "why_it_explodes.py", "--help")
    assert output.startswith("usage: why_it_explodes.py")
    assert "trained" not in output


def test_documented_study_file_is_valid_and_has_every_key(tmp_path):
    block = re.search(r"```toml\n(.*?)```", (ROOT / "docs" / "studies.md").read_text(), re.DOTALL)
    assert block
    study = tmp_path / "study.toml"
    study.write_text(block[1])
    options = read_study_file(study)
    assert len(comparison(**options.comparison).specs(default_training("digits"), "", "", "")) == 25
    study.write_text(block[1].replace("# lr = 0.01 ", "lr = 0.01 "))
    assert comparison(**read_study_file(study).comparison).lr["ewc"] == (0.01,)
    keys = {field.name for kind in (StreamOptions, Training) for field in fields(kind)} - {"paper"}
    for key in keys | {*TOP_KEYS, *TUNE_ARGUMENTS, *METHOD_KEYS} - {"stream", "train", "method", "tune"}:
        assert re.search(rf"^(# )?{key} = ", block[1], re.MULTILINE), key


def test_readme_lists_what_the_demo_compares():
    text = (ROOT / "README.md").read_text()
    assert f"{len(METHODS)} methods" in text
    assert "mooring compare --stream digits --methods all --seeds 5" in (ROOT / "Makefile").read_text()


def test_paper_example_runs_in_miniature(tmp_path):
    study = str(tmp_path / "paper.sqlite")
    table = run(ROOT / "examples" / "paper_in_one_file.py", "--stream", "digits", "--seeds", "2", "--study", study)
    assert "52 settings searched" in table
    assert len(re.findall(r"^explicit-\w+ .* lr 0\.0\d", table, re.MULTILINE)) == 4


@pytest.mark.parametrize("name", ["EWC", "MAS", "SI", "RWalk", "Uniform", "Random"])
def test_sections_state_the_memory_of_each_importance(name):
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer, importance=name.lower())
    for _ in range(2):
        model(torch.randn(4, 100)).square().mean().backward()
        optimizer.step()
        if not moor.tasks:
            moor.consolidate()
    numbers = sum(value.numel() for value in moor.state_dict().values())
    section = method_sections("importances.md")[name]
    assert int(re.search(r"keeps (\d)", section)[1]) == round(numbers / sum(p.numel() for p in model.parameters()))
    assert repr(getattr(mooring, name)()).split("(")[0] in section


PARTS = ("What it is", "When to use it", "Quick start", "Options", "Reference")


def method_sections(page):
    """Return the sections of a page of methods by the name of the method."""
    text = (ROOT / "docs" / page).read_text()
    return dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize(("page", "scores"), [("importances.md", True), ("pulls.md", False)])
def test_every_importance_and_pull_has_the_same_parts_and_every_option_with_its_default(page, scores):
    bases = (rules.Importance, rules.GradientPull, rules.ParameterPull, rules.Iteration)
    public = {name: getattr(rules, name) for name in rules.__all__}
    kinds = {name: kind for name, kind in public.items() if isinstance(kind, type) and kind not in bases}
    kinds = {name: kind for name, kind in kinds.items() if issubclass(kind, rules.Importance) == scores}
    sections = method_sections(page)
    assert set(sections) == set(kinds)
    for name, section in sections.items():
        assert tuple(re.findall(r"^\*\*([A-Z][\w ]+)\.\*\*", section, re.MULTILINE)) == PARTS, name
        for sign in ("```math\n", "![", "*Cost:* ", "```python\nimport torch\nimport mooring\n"):
            assert sign in section, (name, sign)
        table = section.split("**Options.**")[1].split("**Reference.**")[0]
        options = dict(re.findall(r"^\| `(\w+)` \| `?([^|`]+)`? \|", table, re.MULTILINE))
        defaults = {parameter.name: parameter.default for parameter in signature(kinds[name]).parameters.values()}
        assert list(options) == list(defaults), name
        for option, default in defaults.items():
            shown = "required" if default is Parameter.empty else repr(default).replace("'", '"')
            assert options[option] == shown, (name, option)


def test_figures_of_the_comparison_are_those_of_the_page_on_adapters():
    """Each row has the name of a method in words, so figures are looked up by value."""
    measured = (ROOT / "docs" / "comparison.md").read_text().split("## Measured: LoRA")[1].split("\n## ")[0]
    cells = re.findall(r"(?<=\| )(\d[\d.]*(?: ± [\d.]+)?)(?:, beyond 0\.1)?(?= \|)", measured)
    assert len(cells) == 8 * 2 + 8 * 4
    source = (ROOT / "docs" / "adapters.md").read_text()
    for cell in set(cells):
        assert re.search(rf"\| {re.escape(cell)}[ ,]", source), cell


EXAMPLES = sorted((ROOT / "examples").iterdir())
LONGER = {"finetune_language_model.py"}
"""Examples that train a language model, which may be longer."""


@pytest.mark.parametrize("example", [e for e in EXAMPLES if e.is_file() and e.name not in LONGER], ids=lambda e: e.name)
def test_every_example_is_short_documented_and_tested(example):
    lines = example.read_text().splitlines()
    assert len(lines) < 150
    assert re.match(r'"""[A-Z].*\.$|# [A-Z].*`$', lines[0])
    assert f'"{example.name}"' in Path(__file__).read_text()


def test_own_method_example_is_surely_better_than_plain(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str((ROOT / "examples" / "own_method.py").parent))
    methods = ["plain", "own_method:TRAVELLED"]
    stream = StreamOptions("digits", tasks=3, limit=100)
    _, row = Study(tmp_path / "study.sqlite").compare(
        stream=stream, methods=methods, seeds=4, epochs=5, lr=0.05, baseline="plain"
    )
    assert row.difference.low > 0


@pytest.mark.faults  # slow
def test_own_images_example_runs(tmp_path):
    table = run(ROOT / "examples" / "own_images.py", "--seeds", "1", "--epochs", "1", cwd=tmp_path)
    assert table.startswith("stripes: 8 classes, 256 training images, 0 broken")
    assert re.search(r"^budget-ewc \S+ +accuracy [\d.]+ % +forgotten", table, re.MULTILINE)
    assert (tmp_path / "images-report" / "index.html").is_file()


def test_third_party_importance_example_runs():
    table = run(ROOT / "examples" / "third_party_importance.py")
    forgotten = {line[:12].strip(): float(line.split()[-2]) for line in table.splitlines()[1:]}
    assert forgotten["Relative()"] < 0.5 * forgotten["plain"]


@pytest.mark.parametrize(
    ("library", "example", "options"),
    [
        ("transformers", "transformers_trainer.py", ("--steps", "4")),
        ("lightning", "lightning_trainer.py", ("--epochs", "1")),
    ],
)
def test_trainer_examples_run(library, example, options):
    pytest.importorskip(library)
    table = run(ROOT / "examples" / example, *options, strict=False)  # the libraries cause warnings
    assert [line.split()[0] for line in table.splitlines() if line.startswith(("plain", "moored"))] == [
        "plain",
        "moored",
    ]


@pytest.mark.faults  # slow
def test_example_study_file_runs_and_is_short(tmp_path):
    study = tmp_path / "study.toml"
    study.write_text((ROOT / "examples" / "study.toml").read_text().replace("epochs = 5", "epochs = 1"))
    table = run("-m", "mooring_lab", "run", study, "--quiet")
    assert len(re.findall(r"^ewc \d+ ", table, re.MULTILINE)) == 3
    assert (tmp_path / "study-report" / "index.html").is_file()


@pytest.mark.faults
def test_pictures_of_importances_pulls_and_stability_can_be_redrawn(tmp_path):
    code = """if True:
        import runpy, sys
        folder, *scripts = sys.argv[1:]
        sys.path.insert(0, scripts[0].rpartition("/")[0])
        for script in scripts:
            sys.argv = [script, "--folder", folder] + ([] if script.endswith("pulls.py") else ["--epochs", "1"])
            runpy.run_path(script, run_name="__main__")
    """
    scripts = [ROOT / "docs" / "pictures" / f"{name}.py" for name in ("pulls", "importances", "stability")]
    run("-c", code, tmp_path, *scripts)
    drawn = {path.name for path in tmp_path.iterdir()}
    assert len(drawn) == 16
    assert drawn <= {path.name for path in (ROOT / "docs" / "figures").iterdir()}
