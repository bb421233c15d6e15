"""Tests that the benchmark of real networks runs in miniature, continues a file, and refuses what does not fit."""

import importlib
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BRIEF = ["--steps", "2", "--seeds", "1"]


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("real")


@pytest.fixture
def rows(bench, tmp_path):
    """Return a function that runs the benchmark and returns its rows."""

    def run(*arguments):
        out = tmp_path / "results.jsonl"
        assert bench.main([*map(str, arguments), *BRIEF, "--out", str(out)]) == 0
        return [json.loads(line) for line in out.read_text().splitlines()]

    return run


def check(row):
    assert 0 <= row["kept"] <= 100
    assert 0 <= row["new"] <= 100
    assert row["nats"] >= -1e-6
    if row["method"].startswith("budget") and row["method"] != "budget-estimated":
        assert row["gauge"] <= row["dial"]


def test_digits_run_and_continue_where_they_stopped(rows, capsys, tmp_path):
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    (first,) = rows("--methods", "plain", "--dials", "1")
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"method": "plain"')  # killed in the middle of a line
    capsys.readouterr()
    everything = ["--methods", "plain,wise-ft,distillation,budget", "--dials", "1"]
    out = tmp_path / "results.jsonl"
    bench = importlib.import_module("real")
    assert bench.main([*everything, *BRIEF, "--out", str(out)]) == 0
    captured = capsys.readouterr()
    known = importlib.import_module("run_log").read_rows(out)
    assert known[0] == first
    assert [row["method"] for row in known] == ["plain", "wise-ft", "distillation", "budget"]
    for row in known:
        check(row)
    assert known[1]["nats"] == pytest.approx(first["nats"])  # with the dial at 1 it is plain
    assert "[3/3] budget 1, seed 0" in captured.err
    assert "task digits, precision float32, steps 2" in captured.out
    assert (
        bench.main(
            ["--table", "--methods", "plain,budget", "--zoom", "--figure", str(tmp_path / "both"), "--out", str(out)]
        )
        == 0
    )
    assert "distillation" not in capsys.readouterr().out
    assert (tmp_path / "both.svg").read_text().count("rate x 1") == 1
    with pytest.raises(SystemExit):
        bench.main([*everything, "--steps", "3", "--out", str(out)])
    assert "has results of {'task': 'digits'" in capsys.readouterr().err


def test_parts_are_all_runs_once(bench):
    options = [bench.make_parser().parse_args(["--part", f"{part}/3"]) for part in range(3)]
    parts = [list(bench.choices(option, ["plain", "ewc"], None)) for option in options]
    assert len({choice for part in parts for choice in part}) == sum(map(len, parts)) == 3 * (3 + 4)


def test_no_run_is_started_after_the_time_limit(bench, tmp_path, capsys):
    assert bench.main(["--minutes", "-1", "--out", str(tmp_path / "none.jsonl")]) == 0
    assert "runs are left" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--task", "cifar100"], "give --data"),
        (["--task", "folder", "--data", "."], "give --folder"),
        (["--task", "gpt-lora", "--methods", "lora"], "unknown method 'lora' for gpt-lora"),
        (["--part", "3/3"], "'3/3' is no part"),
        (["--pack", "x.pt"], "digits has no images to pack"),
    ],
)
def test_bad_options_are_refused(bench, capsys, arguments, line):
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert line in capsys.readouterr().err


@pytest.mark.faults  # slow
def test_every_method_runs_on_the_digits(rows):
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    known = rows("--dials", "0.5")
    assert len(known) == len(importlib.import_module("real_networks.methods").METHODS)
    for row in known:
        check(row)


@pytest.mark.faults  # slow
@pytest.mark.parametrize("task", ["gpt", "gpt-lora"])
def test_gpt_runs(rows, tmp_path, task):
    small = ["--size", "tiny", "--cache", tmp_path / "cache", "--dials", "0.5"]
    for row in rows("--task", task, "--methods", "plain,wise-ft,budget", *small):
        check(row)


def test_images_are_resized_as_pillow_does_and_keep_their_order(bench):
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    stored = importlib.import_module("real_networks.stored_images")
    generator = torch.Generator().manual_seed(0)
    encoded, expected = [], []
    for number, (height, width) in enumerate([(16, 16), (20, 16), (24, 24), (16, 16)]):
        picture = image.fromarray(
            torch.randint(256, (height, width, 3), generator=generator, dtype=torch.uint8).numpy()
        )
        picture.save(file := io.BytesIO(), format="png")
        encoded.append((file.getvalue(), number))
        expected.append(np.asarray(picture.resize((24, 24), image.Resampling.BICUBIC)))
    images, labels = stored.decoded(encoded, 24, torch.device("cpu"))
    difference = images.int() - torch.from_numpy(np.stack(expected)).permute(0, 3, 1, 2).int()
    assert difference.abs().max() <= 2  # Pillow computes in whole numbers
    assert difference.ne(0).float().mean() < 0.05
    assert labels.tolist() == [0, 1, 2, 3]


@pytest.mark.faults  # slow
def test_packed_images_equal_those_of_a_folder(bench, tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    stored = importlib.import_module("real_networks.stored_images")
    generator = torch.Generator().manual_seed(0)
    for number in range(10):
        folder = tmp_path / "photos" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(256, (20, 30, 3), generator=generator, dtype=torch.uint8)
        image.fromarray(pixels.numpy()).save(folder / f"{number}.png")
    images = dict(zip(("train", "test"), stored.read_folder(tmp_path / "photos", 100, 100), strict=True))
    assert {name: len(pairs) for name, pairs in images.items()} == {"train": 8, "test": 2}
    images["known"] = images["train"]
    stored.write_pack(tmp_path / "pack.pt", images)
    assert stored.read_pack(tmp_path / "pack.pt") == images
    network = importlib.import_module("efficientnet_lite")
    torch.save(network.EfficientNetLite0().state_dict(), tmp_path / "weights.pt")
    paths = ["--data", tmp_path / "pack.pt", "--weights", tmp_path / "weights.pt", "--out", tmp_path / "rows.jsonl"]
    small = ["--task", "cifar100", "--methods", "plain,linear-probe,budget", "--dials", "0.1", "--batch", "4"]
    assert bench.main([*small, *map(str, paths), *BRIEF]) == 0
    known = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["method"] for row in known] == ["plain", "linear-probe", "budget"]
    assert known[1]["nats"] == pytest.approx(0, abs=1e-6)


def accuracies(row):
    """Return what was kept and learned as the page has it, with intervals if there are three seeds."""
    if row["seeds"] > 2:
        return [f"{row[name]:.1f} ± {row[name + '_error']:.1f}" for name in ("kept", "new")]
    return [f"{row[name]:.1f}" for name in ("kept", "new")]


@pytest.mark.parametrize("task", ["cifar100", "flowers102"])
def test_table_of_the_page_is_that_of_its_results(bench, task):
    results = importlib.import_module("real_networks.results")
    docs = BENCHMARKS.parent / "docs"
    lines = (docs / "figures" / f"real-networks-{task}.jsonl").read_text().splitlines()
    page = (docs / "real-networks.md").read_text()
    summaries = results.summarize([json.loads(line) for line in lines])
    assert len(summaries) == {"cifar100": 34, "flowers102": 7}[task]
    for row in summaries:
        cells = accuracies(row)
        others = ["" if np.isnan(row[name]) else f"{row[name]:.3f}" for name in ("nats", "rise")]
        assert f"| {row['seeds']} | {' | '.join([*cells, *others])} |".replace("  |", " |") in page


def test_table_of_the_language_model_has_figures_of_its_results(bench):
    summarize = importlib.import_module("real_networks.results").summarize
    docs = BENCHMARKS.parent / "docs"
    section = (docs / "real-networks.md").read_text().split("## A small language model")[1].split("\n- ")[0]
    cells = [re.split(r" *\| *", line)[2:-1] for line in section.splitlines() if re.match(r"\| [^|-]", line)]
    for columns, task in ((slice(0, 3), "gpt"), (slice(3, 6), "gpt-lora")):
        rows = map(json.loads, (docs / "figures" / f"real-networks-{task}.jsonl").read_text().splitlines())
        known = [[*accuracies(row), f"{row['nats']:.3f}"] for row in summarize(list(rows))]
        shown = [row[columns] for row in cells if any(row[columns])]
        assert len(shown) >= 15
        assert all(row in known for row in shown)


def test_averages_over_several_windows_run_and_continue(bench, tmp_path, capsys):
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    windows = importlib.import_module("average_windows")
    out = tmp_path / "averages.jsonl"
    for _ in range(2):
        assert windows.main(["--first-seed", "2", "--seeds", "1", "--steps", "21", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["window"], row["seed"]) for row in rows] == [(0, 2), (50, 2), (100, 2), (200, 2)]
    assert rows[0]["measured"] != rows[1]["measured"] == rows[2]["measured"]  # windows of 50 and more start alike
    assert "(the last)          1" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        windows.main(["--seeds", "1", "--steps", "28", "--out", str(out)])
    assert "has results of {'task': 'digits'" in capsys.readouterr().err


def test_table_of_averages_has_figures_of_its_results(bench, capsys):
    docs = BENCHMARKS.parent / "docs"
    windows = importlib.import_module("average_windows")
    assert windows.main(["--table", "--out", str(docs / "figures" / "average-windows.jsonl")]) == 0
    printed = [re.split(r"  +", line)[-4:] for line in capsys.readouterr().out.splitlines()[1:]]
    section = (docs / "budget.md").read_text().split("## The average of the last steps")[1].split("```")[0]
    shown = [re.split(r" *\| *", line)[2:-1] for line in section.splitlines() if re.match(r"\| (the|an) ", line)]
    assert shown == printed
    assert len(shown) == 1 + len(windows.STEPS)
