"""Bad input fails in one line that names it, before anything is trained or written."""

import io
import json
import os
import pty
import re
import signal
import sqlite3
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from laboratory.mooring_command import command
from laboratory.one_line import CONTROL, everything_under, one_line, refused
from mooring_lab.cli import main
from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec
from mooring_lab.study.store import Store
from processes import Child

DIGITS = ["--limit", "20", "--epochs", "1", "--seeds", "1", "--methods", "plain,ewc"]


@pytest.fixture(autouse=True)
def _home(monkeypatch, tmp_path):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MOORING_DATA", str(tmp_path / "home"))


@pytest.fixture
def wrong(tmp_path, capsys, monkeypatch):
    return lambda *arguments: refused(tmp_path, list(arguments), capsys, monkeypatch)


def images(folder, **counts: int) -> None:
    """A folder of class folders, with so many small images in each."""
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8)
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, "PNG")
            (folder / name / f"{number}.png").write_bytes(buffer.getvalue())


# Names, numbers and options that are wrong by themselves

COMPARE = {
    "--methods ewk": "unknown method 'ewk' (did you mean 'ewc'?)",
    "--methods explicit-masc": "did you mean 'explicit-mas'?",
    "--methods plain,,ewc": "unknown method ''",
    "--stream digit": "unknown stream 'digit' (did you mean 'digits'?)",
    "--stream digits-permutted": "did you mean 'digits-permuted'?",
    "--stream digits,nothing": "unknown stream 'nothing'; allowed: digits, cifar100, cifar10, flowers102, caltech256, "
    "caltech101, "
    "folder, each also with -permuted or -rotated",
    "--network mpl": "unknown network 'mpl' (did you mean 'mlp'?)",
    "--network os:getcwd": "network 'os:getcwd'",
    "--network os:sep": "network 'os:sep' is not a function",
    "--network nosuch:thing": "network 'nosuch:thing' cannot be imported",
    "--network os:nosuch": "network 'os:nosuch' cannot be imported",
    "--network :": "network ':'",
    "--network .relative:thing": "network '.relative:thing'",
    "--network builtins:dict": "network 'builtins:dict'",
    "--network torch.nn:Conv2d": "network 'torch.nn:Conv2d'",
    "--heads nonsense": "unknown heads 'nonsense'; allowed: inherit, fresh",
    "--heads fresh --scenario class": "heads='fresh' is for tasks with heads of their own, and digits is "
    "class-incremental: leave heads out, or give scenario task",
    "--heads fresh --stream digits,digits-rotated": "and digits-rotated is domain-incremental",
    "--dtype int8": "unknown dtype 'int8'; allowed: float32, float64",
    "--device cuda": "cuda is not available here",
    "--device cuda:1": "cuda is not available here",
    "--device nonsense": "unknown device 'nonsense': give cpu, cuda or cuda:N",
    "--device meta": "unknown device 'meta': give cpu, cuda or cuda:N",
    "--device mps": "device",
    "--per-task 3": "digits has 10 classes, which 3 does not divide: take 1, 2, 5, 10",
    "--per-task 0": "per_task=0",
    "--per-task two": "--per-task",
    "--tasks 0": "tasks=0",
    "--tasks 6": "tasks=6",
    "--skip 5": "skip=5",
    "--skip -1": "skip=-1",
    "--shuffle -1": "shuffle=-1",
    "--limit 0": "limit=0",
    "--limit -3": "limit=-3",
    "--size 8": "size=8 is for images from a folder",
    "--label fine": "label='fine'",
    "--data .": "data='.' is for images from a folder, and digits come with scikit-learn: leave it out",
    "--stream digits-rotated --per-task 2": "per_task=2 is for streams that divide classes",
    "--strength 1 --methods plain": "none of plain has a strength to give",
    "--strength plain=1": "plain has no strength to give",
    "--strength explicit-mas=1 --methods explicit-mas": "explicit-mas has no strength to give",
    "--strength mas=1": "mas is not among the methods (plain, ewc): add it to methods, or leave its strength out",
    "--strength ewk=1": "did you mean 'ewc'?",
    "--strength -1": "strength=-1.0",
    "--strength nan": "strength=nan",
    "--strength 0 --methods ewc,cofima": "strength=0.0 of cofima is not allowed: give a number above 0",
    "--strength soft-si=2 --methods soft-si": "strength=2.0 of soft-si is not allowed: give a number from 0 to 1",
    "--strength 0 --methods owm": "strength=0.0 of owm is not allowed: give a number above 0",
    "--strength much": "--strength much",
    "--strength ewc=": "--strength",
    "--strength 1 --strength 2": "--strength was given 2 times",
    "--lr -0.1": "lr=-0.1",
    "--lr 0": "lr=0",
    "--lr inf": "lr=inf",
    "--lr fast": "--lr fast",
    "--lr mas=1": "mas is not among the methods (plain, ewc): add it to methods, or leave its lr out",
    "--epochs -1": "epochs=-1",
    "--epochs 0": "epochs=0",
    "--epochs 1.5": "--epochs",
    "--batch 0": "batch=0",
    "--batch 1.5": "Invalid value for '--batch'",
    "--momentum=much": "Invalid value for '--momentum'",
    "--batch -5": "batch=-5",
    "--optimizer adam": "did you mean 'adamw'?",
    "--schedule linear": "schedule",
    "--optimizer adamw --momentum 1": "momentum=1.0 is not allowed with adamw: give a number below 1",
    "--momentum -1": "momentum=-1.0",
    "--momentum 2": "momentum=2.0",
    "--weight-decay -1": "weight_decay=-1.0",
    "--memory 0": "memory=0",
    "--memory -1": "memory=-1",
    "--memory 0 --methods er": "memory=0",
    "--memory -1 --methods er": "memory=-1",
    "--seeds 0": "--seeds 0",
    "--seeds abc": "--seeds abc",
    "--seeds -1": "--seeds -1",
    "--seeds 1.5": "--seeds 1.5",
    "--seeds 5-3": "--seeds 5-3",
    "--seeds ,": "--seeds ,",
    "--fleet 0": "fleet=0",
    "--fleet -1": "fleet=-1",
    "--fleet many": "--fleet",
    "--seeds 99999999999999999999": "--seeds 99999999999999999999 is not allowed: give how many",
    "--seeds 0-99999999999": "--seeds 0-99999999999 is not allowed: give how many",
    "--seeds 99999999999999999999,1": "seed=99999999999999999999 is not allowed: give a whole number up to",
    "--epochs 99999999999999999999": "epochs=99999999999999999999 is not allowed: give a whole number up to",
    "--memory 99999999999999999999 --methods er": "memory=99999999999999999999 is not allowed",
    "--shuffle 99999999999999999999": "shuffle=99999999999999999999 is not allowed",
    "--permutation-seed 99999999999999999999 --stream digits-permuted": "seed=99999999999999999999 is not allowed",
    "--share 0": "share=0.0 is not allowed: give a number from 0.01 to 1",
    "--share nan": "share=nan is not allowed: give a number from 0.01 to 1",
    "--share half": "--share",
    "--deterministic yes": "yes",
    "--deterministic --device meta": "unknown device 'meta'",
    "--baseline er": "methods: they are plain, ewc; give one of them, or add it to --methods",
    "--init missing.safetensors": "there is no file missing.safetensors: `mooring pretrain` makes one",
    "--nonsense": "--nonsense",
    "--sedes 1": "--seeds",
    "--seeds": "--seeds",
    "surplus": "(surplus) (see --help)",
    "--stream folder": "a folder stream needs data: give the folder with --data",
    "--stream folder --data .": "give the number of classes of a task with --per-task",
    "--stream folder --per-task 1": "--data",
    "--stream folder --per-task 1 --data missing": "there is no folder missing: give a folder with one for each",
    "--stream cifar10": "cifar10",
}


@pytest.mark.parametrize("asked", COMPARE)
def test_compare_refuses_in_one_line_and_leaves_no_trace(wrong, asked):
    if asked.startswith("--device cuda") and torch.cuda.is_available():
        asked = "--device cuda:99"
    given = asked.split()
    options = [
        part
        for flag, value in zip(DIGITS[::2], DIGITS[1::2], strict=True)
        if flag not in given
        for part in (flag, value)
    ]
    if any("folder" in part or "cifar" in part for part in given):
        options = ["--seeds", "1"]
    said = COMPARE.get(asked, "cuda")
    assert said in wrong("compare", *options, *given)


TUNE = {
    "--search-tasks 5": "has 5 tasks: search fewer than that, not 5",
    "--search-tasks 0": "tasks=0",
    "--search-tasks some": "--search-tasks",
    "--search-seeds 0": "--search-seeds",
    "--search-seeds abc": "--search-seeds",
    "--lrs fast": "--lrs fast",
    "--lrs -1": "lr=-1",
    "--lrs 0.1,": "--lrs",
    "--strengths weak": "--strengths weak",
    "--strengths -1": "strength=-1",
    "--baseline er": "the baseline 'er' is not among",
    "--methods ewk": "did you mean 'ewc'?",
    "--lr 0.1": "--lr",
}


@pytest.mark.parametrize("asked", TUNE)
def test_tune_refuses_in_one_line_and_leaves_no_trace(wrong, asked):
    assert TUNE[asked] in wrong("tune", *DIGITS, *asked.split())


def test_a_study_of_which_no_run_has_finished_is_not_taken_for_none(tmp_path, capsys, monkeypatch):
    (tmp_path / "mine.sqlite.fleets").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["mooring", "show", "mine.sqlite"])
    assert main() == 2
    assert "no run of mine.sqlite has finished yet" in capsys.readouterr().err


OTHERS = {
    "nonsense": "No such command 'nonsense' (see --help)",
    "compar": "Did you mean 'compare'?",
    "data ftech": "No such command 'ftech'",
    "show a.sqlite b.sqlite": "(b.sqlite) (see --help)",
    "show missing.sqlite": "there is no study missing.sqlite",
    "show": "there is no study mooring.sqlite",
    "show .": "folder",
    "report missing.sqlite": "there is no study missing.sqlite",
    "report --to page": "there is no study mooring.sqlite",
    "run": "STUDY.toml",
    "run missing.toml": "No such file or directory): give a study as TOML; docs/studies.md shows every key",
    "run --device cuda": "",
    "methods ewc": "ewc",
    "pretrain --epochs 0": "epochs=0",
    "pretrain --lr -1": "lr=-1",
    "pretrain --batch 0": "batch=0",
    "pretrain --seed -1": "seed=-1",
    "pretrain --seeds 0": "seeds=0",
    "pretrain --shifts -1": "shifts=-1",
    "pretrain --shifts 8": "shifts=8",
    "pretrain --recipe papers": "unknown recipe 'papers' (did you mean 'paper'?); allowed: paper, strong",
    "pretrain --schedule cosinus": "did you mean 'cosine'?",
    "pretrain --dtype bf61": "did you mean 'bf16'?",
    "pretrain --dtype tf32": "dtype='tf32' is for a GPU",
    "pretrain --seeds 2 --out .": "is a folder",
    "pretrain --network mpl": "did you mean 'mlp'?",
    "pretrain --network os:getcwd": "os:getcwd",
    "pretrain --stream digits,digits-permuted": "one stream",
    "pretrain --device nonsense": "unknown device 'nonsense'",
    "pretrain --device cuda": "cuda is not available here",
    "pretrain --per-task 3": "3 does not divide",
    "pretrain --out .": "",
    "pretrain --seeds 99999999999": "seeds=99999999999 is not allowed: give a whole number up to",
    "paper claims --miniature --other-init b.safetensors": "--other-init is for a second network",
    "pretrain --deterministic --device cudda": "unknown device 'cudda'",
    "paper claims --miniature --second-seeds 2": "--second-seeds is for a second network",
    "paper claims --miniature --recipe best": "unknown recipe 'best'; allowed: paper, strong, none",
    "paper table-9": "unknown target 'table-9'",
    "paper fig11": "fig1 to fig10, table1 to table6, eq1 to eq14, alg1",
    "paper claims --miniature --trained-on moon": "unknown device for --trained-on 'moon'; allowed: cpu, cuda",
    "paper claims --miniature --trained-on cuda:1": "unknown device for --trained-on 'cuda:1' (did you mean 'cuda'?)",
    "paper claims --miniature --share 2": "share=2.0 is not allowed: give a number from 0.01 to 1",
}


@pytest.mark.parametrize("asked", OTHERS)
def test_other_commands_refuse_in_one_line_and_leave_no_trace(wrong, asked):
    if "cuda" in asked and torch.cuda.is_available():
        asked = asked.replace("cuda", "nonsense")
    assert OTHERS.get(asked, "") in wrong(*asked.split())


# Files and folders that are not what they should be

LATE = {
    "a class count that does not divide": ["--per-task", "3"],
    "a folder that is missing": ["--stream", "folder", "--per-task", "1", "--data", "missing"],
    "weights that are missing": ["--init", "missing.safetensors"],
    "a network that is none": ["--network", "os:getcwd"],
}


@pytest.mark.parametrize("what", LATE)
def test_a_folder_for_the_study_is_not_made_for_what_is_refused(wrong, what):
    options = [] if "--stream" in LATE[what] else DIGITS
    for name in ("compare", "tune"):
        wrong(name, *options, *LATE[what], "--study", "new/folder/study.sqlite")


def test_a_folder_for_a_backbone_is_not_made_for_what_is_refused(wrong):
    wrong("pretrain", "--per-task", "3", "--out", "new/folder/backbone.safetensors")


def test_a_class_without_a_test_image_is_refused_in_one_line(wrong, tmp_path):
    images(tmp_path / "data", cat=3, dog=1)
    line = wrong(
        "compare", "--stream", "folder", "--data", "data", "--per-task", "1", "--size", "8", "--network", "mlp"
    )
    assert "task 'dog' has no test images" in line


def test_a_class_without_any_image_is_refused_in_one_line(wrong, tmp_path):
    images(tmp_path / "data", cat=3, dog=0)
    line = wrong(
        "compare", "--stream", "folder", "--data", "data", "--per-task", "1", "--size", "8", "--network", "mlp"
    )
    assert "task 'dog' has no training images" in line


def test_a_folder_with_no_images_is_refused_in_one_line(wrong, tmp_path):
    (tmp_path / "data" / "cat").mkdir(parents=True)
    (tmp_path / "data" / "cat" / "read.me").write_text("no image")
    assert "holds no images" in wrong("compare", "--stream", "folder", "--data", "data", "--per-task", "1")


def test_a_class_count_of_a_folder_that_does_not_divide_is_refused_before_images_are_read(wrong, tmp_path):
    for name in ("cat", "dog", "eel"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "1.png").write_bytes(b"never read")
    line = wrong("compare", "--stream", "folder", "--data", "data", "--per-task", "2")
    assert "has 3 classes, which 2 does not divide: take 1, 3" in line


def test_weights_that_do_not_fit_are_refused_in_one_line(wrong, tmp_path):
    save_file({"0.weight": torch.zeros(3)}, tmp_path / "other.safetensors")
    for name in ("compare", "tune"):
        line = wrong(name, *DIGITS, "--init", "other.safetensors")
        assert "other.safetensors does not fit network 'mlp'" in line


@pytest.mark.parametrize("content", [b"", b"no weights at all", b"\xff" * 100])
def test_weights_that_are_none_are_refused_in_one_line(wrong, tmp_path, content):
    (tmp_path / "other.safetensors").write_bytes(content)
    assert "is not a safetensors file" in wrong("compare", *DIGITS, "--init", "other.safetensors")


def test_a_folder_in_place_of_weights_is_refused_in_one_line(wrong, tmp_path):
    (tmp_path / "weights").mkdir()
    line = wrong("compare", *DIGITS, "--init", "weights")
    assert "weights is a folder: give a .safetensors file; `mooring pretrain` makes one" in line


def newer(path) -> None:
    Store(path).log("mooring compare")
    connection = sqlite3.connect(path)
    connection.execute("UPDATE about SET value = '99' WHERE name = 'version'")
    connection.commit()
    connection.close()


NO_STUDY = {
    "of a newer version": (newer, "has layout 99, this Mooring reads"),
    "not a database": (lambda path: path.write_bytes(b"no database" * 200), "is not a SQLite file"),
    "another database": (lambda path: sqlite3.connect(path).executescript("CREATE TABLE t (a)").close(), "not a study"),
    "a folder": (lambda path: path.mkdir(), "is a folder"),
}


@pytest.mark.parametrize("what", NO_STUDY)
@pytest.mark.parametrize("asked", ["compare", "tune", "run", "show", "report"])
def test_a_file_that_is_no_study_is_refused_and_left_as_it_is(wrong, tmp_path, what, asked):
    make, said = NO_STUDY[what]
    connection = make(tmp_path / "mine.sqlite")
    (tmp_path / "mine.toml").write_text("seeds = 1")
    given = {"run": ["mine.toml"], "show": ["mine.sqlite"], "report": ["mine.sqlite", "--to", "page"]}
    assert said in wrong(asked, *given.get(asked, [*DIGITS, "--study", "mine.sqlite"]))
    del connection


@pytest.mark.parametrize("asked", ["show", "report"])
def test_empty_study_is_refused_in_one_line(wrong, tmp_path, asked):
    Store(tmp_path / "mine.sqlite").log("mooring compare")
    assert "has no finished runs yet" in wrong(asked, "mine.sqlite")


@pytest.mark.parametrize("asked", ["show", "report"])
def test_empty_file_is_refused_in_one_line(wrong, tmp_path, asked):
    (tmp_path / "mine.sqlite").touch()
    assert "has no finished runs yet" in wrong(asked, "mine.sqlite")


@pytest.mark.parametrize(
    "place", ["file/study.sqlite", "file/deep/study.sqlite", "/proc/nowhere/study.sqlite", "/dev/full"]
)
def test_read_only_folder_is_refused_before_any_work(wrong, tmp_path, place):
    (tmp_path / "file").write_text("no folder")
    for name in ("compare", "tune"):
        wrong(name, *DIGITS, "--study", place)


def test_report_in_a_read_only_folder_is_refused_before_any_work(wrong, tmp_path):
    (tmp_path / "page").write_text("no folder")
    for name in ("compare", "tune"):
        wrong(name, *DIGITS, "--report", "page")


def kept(path) -> None:
    spec = RunSpec("digits", "0" * 32, "plain", 0)
    lost = RunSpec("digits", "0" * 32, "ewc", 0, strength=1e9)
    Store(path).add(
        [
            Result(spec, "finished", "", [10.0, 10.0], [[90.0, 20.0], [70.0, 80.0]], losses=[[float("nan")], [1.0]]),
            Result(lost, "unstable", "its gradient was not finite", [10.0, 10.0], [], losses=[[float("inf")]]),
        ]
    )


def test_a_baseline_that_is_not_in_the_study_is_refused(wrong, tmp_path):
    kept(tmp_path / "mine.sqlite")
    for asked in ("show", "report"):
        assert "the baseline 'er' is not among the runs: they are of plain, ewc; give one" in wrong(
            asked, "mine.sqlite", "--baseline", "er"
        )


# In an interpreter of its own


def test_a_refusal_from_the_shell_is_one_line_and_status_2(tmp_path):
    arguments = [sys.executable, "-m", "mooring_lab"]
    done = subprocess.run([*arguments, "compare", "--methods", "ewk"], cwd=tmp_path, capture_output=True, text=True)
    assert one_line(done.returncode, done.stdout, done.stderr)
    assert "did you mean 'ewc'?" in done.stderr
    assert everything_under(tmp_path) == {}


@pytest.mark.parametrize("asked", [["compare", "--nonsense"], ["compare", "--seeds", "0"], ["show"], ["data", "fetch"]])
def test_a_refusal_from_a_process_is_one_line_and_status_2(tmp_path, asked):
    done = Child(tmp_path / "child", command, *asked).ended()
    assert one_line(done.status, done.out, done.err)


@pytest.mark.parametrize("asked", [[], ["data"]])
def test_no_command_is_answered_with_help_and_no_traceback(asked, capsys):
    assert main(asked) in (0, 2)
    output = capsys.readouterr()
    assert "Usage" in output.out + output.err
    assert "Traceback" not in output.err


@pytest.mark.parametrize("asked", [["--help"], ["compare", "--help"], ["--version"]])
def test_help_and_version_are_no_errors(asked, capsys):
    assert main(asked) == 0
    assert capsys.readouterr().err == ""


# What programs read


def strict(text: str):
    def never(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=never)


def test_json_is_strict_for_every_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mooring_lab.report.write_report", lambda results, folder, **options: folder / "index.html")
    kept(tmp_path / "kept.sqlite")
    explodes = ["--strength", "ewc=1e12"]
    asked = {
        "compare": ["compare", *DIGITS, *explodes, "--tasks", "2", "--baseline", "plain", "--json", "--quiet"],
        "tune": [
            "tune",
            *DIGITS,
            "--tasks",
            "2",
            "--search-tasks",
            "1",
            "--lrs",
            "0.1",
            "--strengths",
            "1,1e12",
            "--json",
        ],
        "show": ["show", "--runs", "--json"],
        "show what is odd": ["show", "kept.sqlite", "--runs", "--json"],
        "methods": ["methods", "--json"],
        "report": ["report", "--json"],
        "data": ["data", "list", "--json"],
    }
    output = {}
    for name, arguments in asked.items():
        assert main(arguments) == 0, capsys.readouterr().err
        output[name] = strict(capsys.readouterr().out)
    (plain, ewc) = output["compare"]["rows"]
    assert plain["metrics"]["accuracy"]["std"] is None
    assert "unstable" in ewc["verdict"] or ewc["metrics"]
    assert [choice["method"] for choice in output["tune"]["choices"]] == ["plain", "ewc"]
    assert {run["spec"]["method"] for run in output["show"]["runs"]} == {"plain", "ewc"}
    assert output["show what is odd"]["runs"][0]["losses"] == [[None], [1.0]]
    assert {method["name"] for method in output["methods"]} >= {"plain", "ewc"}
    assert output["report"]["page"].endswith("index.html")


# What people see


def test_without_a_terminal_nothing_is_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ["compare", *DIGITS],
        ["show"],
        ["methods"],
        ["tune", *DIGITS, "--tasks", "2", "--search-tasks", "1"],
    ):
        assert main(arguments) == 0
        output = capsys.readouterr()
        assert not [sign for sign in CONTROL if sign in output.out + output.err]


def test_quiet_says_nothing_on_the_way(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *DIGITS]) == 0
    loud = capsys.readouterr()
    assert loud.err.splitlines()[0] == "2 runs to train in 1 fleet"
    assert "1 of 5 tasks done" in loud.err
    assert main(["compare", *DIGITS, "--quiet", "--study", "other.sqlite"]) == 0
    quiet = capsys.readouterr()
    assert quiet.err == ""
    assert quiet.out.replace("other", "mooring") == loud.out


class Terminal:
    """A terminal that writes down what it is sent."""

    def __init__(self) -> None:
        self.near, self.far = pty.openpty()
        self.name = os.ttyname(self.far)
        self.seen = b""
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        while True:
            try:
                part = os.read(self.near, 65536)
            except OSError:
                return
            if not part:
                return
            self.seen += part

    def closed(self) -> str:
        os.close(self.far)
        self.reader.join(5)
        os.close(self.near)
        return self.seen.decode()


def seen(folder, *asked: str) -> tuple[int, str]:
    terminal = Terminal()
    child = Child(folder, command, *asked, terminal=terminal.name, TERM="xterm", COLUMNS="150", LINES="40")
    status = child.ended().status
    return status, terminal.closed()


def test_on_a_terminal_a_bar_shows_fleet_task_and_time_left(tmp_path):
    status, shown = seen(tmp_path, "compare", *DIGITS, "--epochs", "30", "--batch", "5")
    assert status == 0, shown
    for word in ("study", "fleet 1", "2 runs to train in 1 fleet", "accuracy", "%"):
        assert word in shown, word
    assert re.search(r"task \d of 5|\d of 5 tasks done", shown)
    assert "0:00:0" in shown  # how long, and how long it will be
    assert "\x1b[" in shown
    assert "─" in shown  # the table is drawn


def test_on_a_terminal_quiet_says_nothing_on_the_way(tmp_path):
    assert seen(tmp_path, "compare", *DIGITS)[0] == 0  # so that there is nothing left to train
    status, shown = seen(tmp_path, "compare", *DIGITS, "--quiet", "--json")
    assert status == 0
    assert "\x1b" not in shown
    strict(shown)


def test_an_interruption_takes_the_bar_away_and_gives_the_cursor_back(tmp_path):
    terminal = Terminal()
    asked = ["compare", *DIGITS, "--epochs", "2000"]
    child = Child(tmp_path, command, *asked, terminal=terminal.name, TERM="xterm", COLUMNS="150")
    while "of 5" not in terminal.seen.decode(errors="replace") and child.running():
        threading.Event().wait(0.01)
    child.kill(signal.SIGINT)
    status = child.ended().status
    shown = terminal.closed()
    assert status == 130
    assert "the same command continues from here" in shown.splitlines()[-1]
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
