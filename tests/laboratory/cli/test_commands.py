"""Small runs of every command; a study file, the command line and Python give the same runs."""

import inspect
import json
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mooring.errors import MooringError
from mooring.state.norm_statistics import BUFFERS
from mooring_lab.cli import main
from mooring_lab.fleet.fleet import Fleet
from mooring_lab.networks.initialization import read_weights
from mooring_lab.streams.options import StreamOptions
from mooring_lab.study.store import Store
from mooring_lab.study.study import Study

DIGITS = ["--limit", "20", "--tasks", "2", "--epochs", "1", "--seeds", "2"]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def keys(path: str = "mooring.sqlite") -> set[str]:
    return {result.spec.key for result in Store(path).results()}


def never_trained(monkeypatch) -> None:
    monkeypatch.setattr(Fleet, "run", lambda *args: pytest.fail("it trained"))


# frontier


def test_frontier_sweeps_strengths_and_names_the_methods_on_it(run, monkeypatch):
    command = ["frontier", *DIGITS, "--methods", "plain,wise-ft,explicit-ewc", "--out", "drawn"]
    output = run(*command)
    strengths = {result.spec.strength for result in Store("mooring.sqlite").results()}
    assert strengths == {None, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9}
    assert "on the frontier: " in output
    assert "--out DIR" not in output
    never_trained(monkeypatch)
    content = json.loads(run(*command, "--json"))
    assert [Path(path).suffix for path in content["files"]] == [".svg", ".png", ".json"]
    assert all(Path(path).is_file() for path in content["files"])
    assert json.loads(Path("drawn/frontier.json").read_text()) == content["frontiers"]
    (stream,) = content["frontiers"]
    assert {entry["method"] for entry in stream["methods"]} == {"plain", "wise-ft", "explicit-ewc"}


def test_frontier_says_how_many_methods_it_has_by_default(run):
    output = " ".join(run("frontier", "--help").replace("│", " ").split())
    assert "lists them. By default 37 of them." in output
    assert "plain,frozen" not in output


@pytest.mark.parametrize("command", ["compare", "tune", "frontier"])
def test_help_says_what_each_mode_of_buffers_does(run, command):
    output = " ".join(run(command, "--help").replace("│", " ").split())
    help_text = output.partition("--buffers")[2].partition("--init")[0]
    assert re.findall(r"(\w+) \((?:they|layers) ", help_text) == [*BUFFERS]
    assert "(they follow the new data, the default)" in help_text


@pytest.mark.parametrize(
    "command", [["--help"], ["show", "--help"], ["compare", "--help"], ["data", "fetch", "--help"]]
)
def test_help_shows_flags_without_a_value_and_optional_arguments_once_in_brackets(run, command):
    """Typer's own flags are as Typer shows them."""
    output = run(*command)
    own = [line for line in output.splitlines() if "--help " not in line and "-completion " not in line]
    assert not [line for line in own if "<bool>" in line]
    assert "[[" not in output


def test_frontier_takes_other_strengths_for_a_method(run):
    output = run("frontier", *DIGITS, "--methods", "wise-ft", "--strength", "wise-ft=0.25,0.75")
    assert output.splitlines()[-1] == "--out DIR writes the figure"
    assert {result.spec.strength for result in Store("mooring.sqlite").results()} == {0.25, 0.75}


def test_frontier_takes_a_strength_of_0(run):
    output = run("frontier", *DIGITS, "--methods", "wise-ft", "--strength", "wise-ft=0,0.5")
    assert "digits (2 classes a task), tasks 1 to 2" in output


# compare


def test_compare_prints_every_method_and_the_results_file(run):
    output = run("compare", *DIGITS, "--methods", "plain,ewc", "--baseline", "plain").splitlines()
    assert output[0].startswith(
        "digits (2 classes a task), tasks 1 to 2, at most 20 images a task, task-incremental: mlp"
    )
    assert output[0].endswith("over 2 seeds")
    titles = ["average accuracy %", "forgetting (T-1)", "forgetting (T)", "learning accuracy %"]
    assert re.split(r"  +", output[1]) == ["method", *titles, "vs plain [95 %]", "verdict"]
    for title in titles:  # defined where it is shown
        assert any(line.startswith(f"{title.removesuffix(' %')}: ") and "; mean over " in line for line in output[4:])
    assert [line.split()[0] for line in output[2:4]] == ["plain", "ewc"]
    assert output[-1] == "results: mooring.sqlite"


def test_compare_prints_the_stored_numbers(run):
    output = json.loads(run("compare", *DIGITS, "--methods", "plain", "--json"))
    accuracies = [result.metrics["accuracy"] for result in Store("mooring.sqlite").results()]
    assert output["rows"][0]["metrics"]["accuracy"]["mean"] == pytest.approx(sum(accuracies) / len(accuracies))
    assert output["rows"][0]["seeds"] == [0, 1]
    assert output["study"] == "mooring.sqlite"
    assert output["report"] is None


def test_repeated_compare_trains_nothing_takes_little_cpu_time_and_prints_the_same(run, monkeypatch):
    command = ["compare", *DIGITS, "--methods", "plain,ewc,explicit-mas", "--baseline", "ewc"]
    first = run(*command)
    never_trained(monkeypatch)
    began = time.process_time()  # other processes do not change it
    assert run(*command) == first
    assert time.process_time() - began < 1
    assert Store("mooring.sqlite").commands() == [" ".join(["mooring", *command])] * 2


def test_a_line_for_each_setting(run):
    output = json.loads(
        run("compare", *DIGITS, "--methods", "plain,ewc", "--lr", "ewc=0.1,0.2", "--strength", "ewc=1,10", "--json")
    )
    settings = [(row["method"], row["lr"], row["strength"]) for row in output["rows"]]
    assert settings[1:] == [("ewc", lr, strength) for lr in (0.1, 0.2) for strength in (1.0, 10.0)]
    assert settings[0][0] == "plain"


def test_compare_fails_when_no_run_finished(run, monkeypatch, capsys):
    command = ["compare", *DIGITS, "--methods", "uniform", "--strength", "1e30", "--batch", "5", "--quiet"]
    monkeypatch.setattr(sys, "argv", ["mooring", *command])
    assert main() == 1
    output = capsys.readouterr()
    assert "unstable in 2 of 2" in output.out
    assert output.err.startswith("no run finished: give a smaller lr or strength, ")
    assert output.err.count("\n") == 1
    assert main([*command, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["rows"][0]["verdict"] == "unstable in 2 of 2"


def test_several_streams_have_a_table_each(run):
    output = run("compare", "--stream", "digits,digits-permuted,digits-rotated", *DIGITS, "--methods", "plain")
    assert output.count("mean ± std over 2 seeds") == 3


def test_report_option_writes_the_page(run, monkeypatch, tmp_path):
    calls = []

    def write_report(results, folder, **options):
        calls.append((results, folder, options))
        return folder / "index.html"

    monkeypatch.setattr("mooring_lab.report.write_report", write_report)
    command = ["compare", *DIGITS, "--methods", "plain,ewc", "--baseline", "plain", "--report", "page"]
    assert run(*command).splitlines()[-1] == "page:    page/index.html"
    ((results, folder, options),) = calls
    assert {result.spec.key for result in results} == keys()
    assert str(folder) == "page"
    assert options == {"command": " ".join(["mooring", *command]), "baseline": "plain"}
    assert run("report", "--to", "other", "--title", "Mine", "--baseline", "ewc") == "page: other/index.html\n"
    assert str(calls[1][1]) == "other"
    assert calls[1][2] == {"title": "Mine", "command": " ".join(["mooring", *command]), "baseline": "ewc"}


def test_a_network_in_the_folder_where_one_is_can_be_named(run, tmp_path, monkeypatch):
    (tmp_path / "my_own.py").write_text(
        "from torch import nn\n\n\ndef narrow(shape):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5))\n"
    )
    # as the installed command is started: its own folder comes first, and not the one that one is in
    scripts = str(Path(sys.executable).parent)
    monkeypatch.setattr(sys, "path", [scripts, *(entry for entry in sys.path if entry not in ("", str(tmp_path)))])
    run("compare", *DIGITS, "--methods", "plain", "--network", "my_own:narrow")
    (network,) = {result.spec.network for result in Store("mooring.sqlite").results()}
    assert network.startswith("my_own:narrow@")


NET = (
    "from torch import nn\n\n\n"
    "def net(shape, width={}):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, width))\n"
)
PARTIAL = "from functools import partial\n\nfrom helper import net as made\n\nnet = partial(made, width={})\n"
CHANGES = {
    "source": {"named.py": NET},
    "import": {"named.py": "from helper import net\n", "helper.py": NET},
    "partial": {"named.py": PARTIAL, "helper.py": NET.format(9)},
    "indirect import": {
        "named.py": "import parts.blocks\n\nnet = parts.blocks.net\n",
        "parts/__init__.py": "",
        "parts/blocks.py": "def net(shape):\n    from .sizes import made\n\n    return made(shape)\n",
        "parts/sizes.py": NET.replace("def net", "def made"),
    },
    "data file": {
        "named.py": "from pathlib import Path\n\nfrom helper import net as made\n\n\ndef net(shape):\n"
        "    return made(shape, int(Path(__file__).with_name('width').read_text()))\n",
        "helper.py": NET.format(9),
        "width": "{}",
    },
}
"""Files of a network of one's own, in which {} is the width of its layer."""


@pytest.mark.parametrize("change", CHANGES)
def test_a_network_of_ones_own_that_was_changed_is_another_network(tmp_path, monkeypatch, change):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    study, options, stored = Study(tmp_path / "study.sqlite"), StreamOptions("digits", tasks=1, limit=20), []
    for width in (5, 5, 6):
        for file, text in CHANGES[change].items():
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).write_text(text.format(width))
        for name in [name for name in sys.modules if name.partition(".")[0] in ("named", "helper", "parts")]:
            monkeypatch.delitem(sys.modules, name)
        study.compare(stream=options, network="named:net", methods="plain", seeds=1, epochs=1)
        stored.append(len(study.results()))
    assert stored == [1, 1, 2]


def test_custom_network_that_fails_is_refused_in_one_line(run, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "failing.py").write_text("from torch import nn\n\n\ndef net(shape):\n    return nn.Linear(999, 3)\n")
    with pytest.raises(MooringError, match=r"network 'failing:net.* fails on an image of shape \(1, 8, 8\)"):
        Study(tmp_path / "study.sqlite").compare(stream="digits", network="failing:net", methods="plain", seeds=1)


# tune


def test_tune_tells_what_it_chose_what_it_dropped_and_what_came_of_it(run):
    command = ["tune", "--limit", "20", "--tasks", "3", "--epochs", "1", "--seeds", "1", "--methods", "plain,ewc"]
    grid = ["--search-tasks", "1", "--lrs", "0.05,0.1", "--strengths", "1,1e9"]
    output = run(*command, *grid)
    assert output.startswith("searched digits (2 classes a task), ")
    assert "ewc 1e+09: after 1 task lr * strength * importance leaves (0, 1)" in output
    assert "other 2, trained" in output
    content = json.loads(run(*command, *grid, "--json"))
    assert [(choice["method"], choice["grid"], len(choice["dropped"])) for choice in content["choices"]] == [
        ("plain", 2, 0),
        ("ewc", 4, 2),
    ]
    for choice, row in zip(content["choices"], content["rows"], strict=True):
        assert (row["lr"], row["strength"]) == (choice["best"]["lr"], choice["best"]["strength"])


# run


STUDY_FILE = """
methods = ["plain", "ewc", "er"]
seeds = [0, 2]
[stream]
name = "digits"
per_task = 5
limit = 20
[train]
epochs = 1
batch = 10
optimizer = "adamw"
schedule = "warmup-linear"
momentum = 0
weight_decay = 0.001
memory = 10
heads = "fresh"
dtype = "float64"
[method.ewc]
lr = 1
strength = [10, 100]
"""
TYPED = (
    "compare --methods plain,ewc,er --seeds 0,2 --stream digits --per-task 5 --limit 20 --epochs 1 --batch 10 "
    "--optimizer adamw --schedule warmup-linear --momentum 0 "
    "--weight-decay 0.001 --memory 10 --heads fresh --dtype float64 --lr ewc=1 --strength ewc=10,100 "
    "--study typed.sqlite"
)


def test_a_file_the_command_line_and_python_ask_for_the_same_runs(run, tmp_path):
    (tmp_path / "written.toml").write_text(STUDY_FILE)
    run("run", "written.toml")
    run(*TYPED.split())
    Study("called.sqlite").compare(
        stream=StreamOptions("digits", per_task=5, limit=20),
        methods=["plain", "ewc", "er"],
        seeds=[0, 2],
        epochs=1,
        batch=10,
        optimizer="adamw",
        schedule="warmup-linear",
        momentum=0.0,
        weight_decay=0.001,
        memory=10,
        heads="fresh",
        dtype="float64",
        lr={"ewc": 1.0},
        strength={"ewc": [10.0, 100.0]},
    )
    assert len(keys("written.sqlite")) == 2 + 4 + 2
    assert keys("typed.sqlite") == keys("called.sqlite")
    assert keys("written.sqlite") == keys("typed.sqlite")


def test_all_three_start_from_the_same_defaults(run, tmp_path, monkeypatch):
    (tmp_path / "written.toml").write_text('methods = ["plain", "ewc"]\nseeds = 1\n[stream]\nlimit = 20\ntasks = 2\n')
    run("run", "written.toml")
    run("compare", "--methods", "plain,ewc", "--seeds", "1", "--limit", "20", "--tasks", "2", "--study", "typed.sqlite")
    study = Study("called.sqlite")
    study.compare(stream=StreamOptions("digits", limit=20, tasks=2), methods="plain,ewc", seeds=1)
    assert keys("written.sqlite") == keys("typed.sqlite") == keys("called.sqlite")


def test_the_command_line_and_a_file_compare_the_same_methods_where_none_are_named(tmp_path):
    from mooring_lab.cli.compare_command import compare
    from mooring_lab.study.comparison import comparison
    from mooring_lab.study.study_file import read_study_file

    methods = tuple(inspect.signature(compare).parameters["methods"].default.split(","))
    (tmp_path / "empty.toml").write_text("")
    assert comparison(**read_study_file(tmp_path / "empty.toml").comparison).methods == methods
    assert comparison().methods == methods


def test_run_twice_is_instant_and_searches_where_the_file_says_so(run, tmp_path, monkeypatch):
    text = 'methods = ["plain"]\nseeds = 1\nbaseline = "plain"\n[stream]\nlimit = 20\ntasks = 3\n[train]\nepochs = 1\n'
    (tmp_path / "mine.toml").write_text(text + "[tune]\ntasks = 1\nlrs = [0.1, 0.01]\n")
    first = run("run", "mine.toml")
    assert first.startswith("searched digits")
    never_trained(monkeypatch)
    assert run("run", "mine.toml") == first


def test_run_takes_paths_from_where_the_file_lies(run, tmp_path, monkeypatch):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "mine.toml").write_text(
        'study = "kept/mine.sqlite"\nmethods = ["plain"]\nseeds = 1\n'
        "[stream]\nlimit = 20\ntasks = 2\n[train]\nepochs = 1\n"
    )
    run("run", "deep/mine.toml")
    assert len(keys("deep/kept/mine.sqlite")) == 1


# show


def test_show_prints_the_tables_of_compare_without_training(run, monkeypatch):
    output = run("compare", *DIGITS, "--methods", "plain,ewc")
    never_trained(monkeypatch)
    assert run("show") == output.removesuffix("results: mooring.sqlite\n")
    content = json.loads(run("show", "mooring.sqlite", "--json", "--runs"))
    assert {run["key"] for run in content["runs"]} == keys()
    assert content["commands"] == [" ".join(["mooring", "compare", *DIGITS, "--methods", "plain,ewc"])]
    assert "runs" not in json.loads(run("show", "--json"))


def test_show_tells_rows_apart_that_differ_in_memory(run):
    for memory in ("10", "20"):
        run("compare", *DIGITS, "--methods", "plain,er", "--memory", memory)
    header, plain, *replay = (line.split() for line in run("show").splitlines()[1:5])
    assert header[:2] == ["method", "memory"]
    assert [row[:2] for row in replay] == [["er", "10"], ["er", "20"]]
    assert plain[0] == "plain"
    assert plain[1] != "None"


def test_show_leaves_a_study_as_it_is(run, tmp_path):
    run("compare", *DIGITS, "--methods", "plain")
    before = (tmp_path / "mooring.sqlite").read_bytes()
    run("show", "--baseline", "plain")
    assert (tmp_path / "mooring.sqlite").read_bytes() == before


# methods


def test_methods_lists_every_method_with_a_line_and_its_strength(run):
    from mooring_lab.methods import METHODS
    from mooring_lab.study.comparison import comparison

    tables = [part.splitlines() for part in run("methods").strip().split("\n\n")]
    for title, header, *_ in tables:  # a group each, which --methods knows by name
        assert re.search(r"\(--methods [a-z]+\)$", title)
        assert header.split() == ["method", "what", "it", "does", "strength", "on", "digits", "elsewhere"]
    output = [line for table in tables for line in table[2:]]
    assert sorted(line.split()[0] for line in output) == sorted(METHODS)
    content = json.loads(run("methods", "--json"))
    assert [(entry["name"], entry["strength"]["on_digits"], entry["memory"]) for entry in content] == [
        (method.name, method.strength, method.memory) for method in METHODS.values()
    ]
    assert next(line for line in output if line.startswith("ewc ")).split()[-2:] == ["1e+07", "1000"]
    elsewhere = comparison(StreamOptions("cifar10"), "all", seeds=1)
    for entry, spec in zip(content, elsewhere.specs(elsewhere.streams[0][1], "", "", ""), strict=True):
        assert entry["strength"]["elsewhere"] == spec.strength


# pretrain


def test_pretrain_writes_a_backbone_that_runs_start_from(run):
    output = json.loads(
        run(
            "pretrain",
            "--network",
            "mlp",
            "--limit",
            "40",
            "--epochs",
            "3",
            "--lr",
            "0.05",
            "--out",
            "b.safetensors",
            "--json",
        )
    )
    assert output["backbone"] == "b.safetensors"
    assert 0 <= output["accuracy"] <= 100
    weights = load_file("b.safetensors")
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())
    run("compare", *DIGITS, "--methods", "frozen", "--init", "b.safetensors")
    run("compare", *DIGITS, "--methods", "frozen")
    starts = {result.spec.init for result in Store("mooring.sqlite").results()}
    assert len(starts) == 2
    assert "" in starts


def test_pretrain_writes_several_backbones_with_their_seeds_in_the_name(run):
    few = ("pretrain", "--network", "mlp", "--limit", "20", "--epochs", "1", "--shifts", "1", "--schedule", "cosine")
    output = json.loads(run(*few, "--seed", "1", "--seeds", "2", "--out", "b.safetensors", "--json"))
    assert [(entry["backbone"], entry["seed"]) for entry in output] == [("b-1.safetensors", 1), ("b-2.safetensors", 2)]
    assert all(0 <= entry["accuracy"] <= 100 for entry in output)
    lines = run(*few, "--seeds", "2", "--out", "c.safetensors").splitlines()
    assert [line.split(":")[0] for line in lines] == ["c-0.safetensors", "c-1.safetensors"]
    assert read_weights("b-1.safetensors").fingerprint == read_weights("c-1.safetensors").fingerprint


def test_a_backbone_taught_twice_is_the_same_start(run):
    for name in ("b.safetensors", "c.safetensors"):
        run("pretrain", "--network", "mlp", "--limit", "20", "--epochs", "1", "--out", name)
    assert read_weights("b.safetensors").fingerprint == read_weights("c.safetensors").fingerprint


def test_a_backbone_under_another_name_is_the_same_start(run, monkeypatch):
    run("pretrain", "--network", "mlp", "--limit", "20", "--epochs", "1", "--out", "b.safetensors")
    run("compare", *DIGITS, "--methods", "plain", "--init", "b.safetensors")
    with open("b.safetensors", "rb") as one, open("c.safetensors", "wb") as other:
        other.write(one.read())
    never_trained(monkeypatch)
    run("compare", *DIGITS, "--methods", "plain", "--init", "c.safetensors")


# data


def test_a_folder_of_images_is_compared(run, tmp_path):
    import numpy as np
    from PIL import Image

    for number, name in enumerate(("cat", "dog", "eel", "fox")):
        (tmp_path / "images" / name).mkdir(parents=True)
        for seed in range(6):
            pixels = np.random.default_rng(10 * number + seed).integers(0, 256, (8, 8, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{seed}.png")
    folder = ["--stream", "folder", "--data", "images", "--per-task", "2", "--size", "8", "--network", "mlp"]
    output = run("compare", *folder, "--methods", "plain", "--seeds", "1")
    assert output.startswith("images (2 classes a task), task-incremental: mlp, 1 epoch, batch 10, lr 0.001")
