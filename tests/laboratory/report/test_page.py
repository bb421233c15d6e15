"""One page that needs nothing else, tells the truth, and is replaced as a whole."""

import errno
import math
import os
import re
import statistics
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from laboratory.report import synthetic
from mooring.errors import MooringError
from mooring_lab.model.metric_definitions import DEFINITIONS
from mooring_lab.report import write_report

PAGE = {"title": "Digits", "command": "mooring run digits --seeds 3"}
FIGURES = {"tradeoff", "tasks", "matrices", "losses", "importance", "cka", "drift"}


class Reader(HTMLParser):
    """Every element with its attributes, the cells of every row, and whether what opens also closes."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.elements, self.rows, self.scripts, self.cell = [], [], 0, None
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self.scripts += tag == "script"
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th") and self.rows:
            self.rows[-1].append({"sort": dict(attributes).get("data-sort"), "text": ""})
            self.cell = self.rows[-1][-1]

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.cell = None

    def handle_data(self, data):
        if self.cell is not None:
            self.cell["text"] += data


@pytest.fixture(scope="module")
def results():
    return synthetic.study()


@pytest.fixture(scope="module")
def page(results, tmp_path_factory):
    return write_report(results, tmp_path_factory.mktemp("reports") / "new" / "report", **PAGE, baseline="plain")


def test_the_page_needs_nothing_from_outside(page):
    html = page.read_text(encoding="utf-8")
    assert "://" not in html
    assert "@import" not in html
    assert set(re.findall(r"url\((.)", html)) <= {"#"}
    for tag, attributes in Reader(page).elements:
        assert tag not in ("link", "img", "iframe", "object", "embed")
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:image/png;base64,")), (tag, attributes)


def test_every_figure_is_there_as_svg_as_png_and_in_the_page(page):
    names = {f"{stream}-{name}" for stream in ("split-digits", "permuted-digits") for name in FIGURES}
    assert {path.name for path in (page.parent / "figures").iterdir()} == {
        f"{name}{ending}" for name in names for ending in (".svg", ".png")
    }
    assert {path.name for path in page.parent.iterdir()} == {"index.html", "figures"}
    elements = Reader(page).elements
    assert {attributes["id"] for tag, attributes in elements if tag == "figure"} == {f"figure-{name}" for name in names}
    assert sum(tag == "svg" for tag, _ in elements) == len(names)
    for path in (page.parent / "figures").iterdir():
        start = path.read_bytes()[:8]
        assert start == b"\x89PNG\r\n\x1a\n" if path.suffix == ".png" else start.startswith(b"<?xml")


def test_no_id_is_used_twice_and_every_reference_leads_somewhere(page):
    elements = Reader(page).elements
    ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    html = page.read_text(encoding="utf-8")
    used = set(re.findall(r'href="#([^"]+)"', html)) | set(re.findall(r"url\(#([^)]+)\)", html))
    assert len(used) > 10
    assert used <= set(ids)


def test_the_same_results_make_the_same_bytes(page, results, tmp_path):
    again = write_report(results, tmp_path, **PAGE, baseline="plain")
    assert again.read_bytes() == page.read_bytes()
    for path in (page.parent / "figures").iterdir():
        assert (tmp_path / "figures" / path.name).read_bytes() == path.read_bytes()


def test_numbers_in_the_table_are_the_metrics_computed_by_hand(page, results):
    runs = [run for run in results if run.spec.method == "mas"]
    plain = [run for run in results if run.spec.method == "plain" and run.spec.stream == "split digits"]
    accuracy = [sum(run.matrix[-1]) / 5 for run in runs]
    forgetting = [
        sum(max(run.matrix[i][k] for i in range(k, 5)) - run.matrix[-1][k] for k in range(5)) / 5 for run in runs
    ]
    learned = [sum(run.matrix[k][k] for k in range(5)) / 5 for run in runs]
    backward = [sum(run.matrix[-1][k] - run.matrix[k][k] for k in range(4)) / 4 for run in runs]
    forward = [sum(run.matrix[k - 1][k] - run.untrained[k] for k in range(1, 5)) / 4 for run in runs]
    apart = [own - sum(other.matrix[-1]) / 5 for own, other in zip(accuracy, plain, strict=True)]
    half = 4.302652729911275 / math.sqrt(3)  # Student's t for two degrees of freedom, 0.975

    rows = Reader(page).rows
    head, row = rows[0], next(row for row in rows if row[0]["sort"] == "mas")
    titles = [cell["text"].strip() for cell in head]
    cells = dict(zip(titles, row, strict=True))
    assert cells["strength"]["text"] == "100"
    assert "lr" not in cells  # it is the same everywhere, and in the sentence above the table
    earlier = [
        sum(max(run.matrix[i][k] for i in range(k, 4)) - run.matrix[-1][k] for k in range(4)) / 4 for run in runs
    ]
    incremental = [sum(sum(run.matrix[i][: i + 1]) / (i + 1) for i in range(5)) / 5 for run in runs]
    joint = [run for run in results if run.spec.method == "joint"]
    expected = {
        "average accuracy %": accuracy,
        "average incremental accuracy %": incremental,
        "forgetting (T-1) points": earlier,
        "forgetting (T) points": forgetting,
        "learning accuracy %": learned,
        "backward transfer points": backward,
        "forward transfer points": forward,
        "intransigence points": [sum(j.matrix[-1]) / 5 - own for j, own in zip(joint, learned, strict=True)],
    }
    for title, values in expected.items():
        mean, std = statistics.mean(values), statistics.stdev(values)
        assert float(cells[title]["sort"]) == pytest.approx(mean)
        assert cells[title]["text"].replace("\u2212", "-") == f"{mean:.2f} ± {std:.2f}"
    mean, std = statistics.mean(accuracy), statistics.stdev(accuracy)
    assert cells["95 % interval %"]["text"].strip() == f"{mean - half * std:.2f} to {mean + half * std:.2f}"
    mean, std = statistics.mean(apart), statistics.stdev(apart)
    assert cells["vs plain points"]["text"] == f"+{mean:.2f} {mean - half * std:.2f} to {mean + half * std:.2f}"
    assert cells["seeds finished"]["text"] == "3"
    assert cells["verdict"]["text"] == "finished"


def test_headline_names_the_comparison_and_the_outcome(page):
    html = page.read_text(encoding="utf-8")
    assert (
        "8 methods at 10 settings on 5 tasks, task-incremental (one head per task; the task is known at test time), "
        "3 seeds (0\u20132). All have network <b>mlp</b>, lr <b>0.03</b>, epochs <b>5</b>, batch <b>20</b>" in html
    )
    assert "<title>Digits</title>" in html
    gap = (
        r"Plain fine-tuning ended \d+\.\d\d points below joint training, which sees all tasks at once; er closed \d+ %"
    )
    assert re.search(gap, html)
    assert "Of 30 runs, 1 was unstable and 3 were rejected." in html
    assert "All 6 runs finished." in html


def test_page_shows_stability_and_unfinished_runs(page):
    rows = [[cell["text"] for cell in row] for row in Reader(page).rows]
    reason = "the loss of task 3 is not finite in layer fc1: lower the strength"
    assert ["ewc 10000", "1", "unstable", "2", reason] in rows
    assert sum(row[0] == "si 1e6" and row[2] == "rejected" for row in rows) == 3
    verdict = [row for row in rows if row[:2] == ["mas", "100"] and len(row) == 10]
    runs = [run for run in synthetic.study() if run.spec.method == "mas"]
    assert verdict[0][2] == f"{max(run.stability[0].largest for run in runs):.3g}"
    assert verdict[0][3] == f"{max(run.stability[-1].largest for run in runs):.3g}"


def test_page_shows_command_versions_and_time(page):
    html = page.read_text(encoding="utf-8")
    assert "<pre><code>mooring run digits --seeds 3</code></pre>" in html
    assert "mooring 0.1.0, torch 2.13.0, python 3.11.7, device NVIDIA H200" in html
    assert "2 min 6 s" in html
    assert "36, of " in html


def test_names_are_escaped(tmp_path):
    evil = "</script></svg><script>alert(1)</script>"
    runs = [synthetic.run("plain", seed, stream=evil) for seed in (0, 1)]
    runs += [replace(run, spec=replace(run.spec, method='<b onclick="x">$\\frac{$ \0\ud800 字')) for run in runs]
    runs += [synthetic.run("ewc", 0, stream=evil, status="unstable", reached=1)]
    runs[-1] = replace(runs[-1], reason=evil, versions={evil: evil}, drift={evil: 1.0})
    page = write_report(
        runs, tmp_path, title=evil, command=f"mooring {evil}\n  --more \0", baseline=runs[2].spec.method
    )
    reader = Reader(page)
    assert reader.scripts == 1
    assert not any("onclick" in attributes or (tag == "b" and attributes) for tag, attributes in reader.elements)
    for path in (tmp_path / "figures").glob("*.svg"):
        assert b"<script" not in path.read_bytes()
    assert {path.name for path in (tmp_path / "figures").iterdir()} >= {"script-svg-script-alert-1-script-tasks.svg"}


def test_only_the_pages_own_script_may_run(page):
    policy = next(attributes["content"] for tag, attributes in Reader(page).elements if "http-equiv" in attributes)
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy


def test_one_seed_has_means_and_no_deviations(tmp_path):
    page = write_report([synthetic.run("plain", 0), synthetic.run("ewc", 0)], tmp_path, **PAGE, baseline="plain")
    head = next(row for row in Reader(page).rows if row[0]["text"] == "method")
    row = next(row for row in Reader(page).rows if row[0]["sort"] == "ewc")
    titles = ["method", "strength", "average accuracy %", "vs plain points", "average incremental accuracy %"]
    titles += ["forgetting (T-1) points", "forgetting (T) points", "learning accuracy %", "backward transfer points"]
    titles += ["forward transfer points", "seeds finished"]  # no interval, and every run finished
    assert [cell["text"] for cell in head] == titles
    assert all(re.fullmatch("[\u2212+]?\\d+\\.\\d\\d", cell["text"]) for cell in row[2:8])
    html = page.read_text(encoding="utf-8")
    assert not re.search(r"\bnan\b", html)
    assert "<dt>95 % interval</dt>" not in html


def test_parts_without_content_are_left_out(tmp_path):
    bare = [replace(synthetic.run("ewc", 0), losses=[], importance={}, drift={}, cka={}, stability=[], versions={})]
    page = write_report(bare, tmp_path, **PAGE)
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == {
        f"split-digits-{name}" for name in ("tradeoff", "tasks", "matrices")
    }
    html = page.read_text(encoding="utf-8")
    assert " vs " not in html
    assert "stability" not in html
    explained = re.findall(r"<dt>(.+?)</dt>", html)
    assert explained == [
        *("Average accuracy", "Average incremental accuracy", "Forgetting (T-1)", "Forgetting (T)"),
        *("Learning accuracy", "Backward transfer", "Forward transfer"),
        *("Runs", "Seeds", "Training time", "Numbers", "Figures"),
    ]


def test_page_explains_every_metric_and_says_which_forgetting_it_means(page):
    html = page.read_text(encoding="utf-8")
    explained = [term.lower() for term in re.findall(r"<dt>(.+?)</dt>", html)]
    assert explained[: len(DEFINITIONS)] == [definition.title.lower() for definition in DEFINITIONS.values()]
    assert "average forgetting" not in html
    assert "points forgotten" not in html
    assert re.search(r"\d\.\d\d points of forgetting \(T\)\.", html)
    assert "forgetting (T), points (less is better)" in html


def test_contents_name_every_part_of_the_page(page):
    html = page.read_text(encoding="utf-8")
    contents = re.search(r"<nav.*?</nav>", html, re.DOTALL)[0]
    targets = re.findall(r'href="#([^"]+)"', contents)
    parts = re.findall(r'<(?:section|figure)[^>]* id="([^"]+)"', html) + re.findall(r'<h3 id="([^"]+)"', html)
    assert sorted(targets) == sorted(parts)
    assert len(targets) == len(set(targets)) == 2 * (3 + len(FIGURES)) + 2


def test_page_without_a_title_is_named_after_its_methods_and_streams(tmp_path):
    runs = [synthetic.run("plain", 0, tasks=1), synthetic.run("ewc", 0, tasks=1, stream="permuted digits")]
    html = write_report(runs, tmp_path, command="mooring run").read_text(encoding="utf-8")
    assert "<title>2 methods on split digits, task-incremental; permuted digits, task-incremental</title>" in html
    assert "<h1>2 methods on split digits, task-incremental; permuted digits, task-incremental</h1>" in html


def test_no_interval_leaves_the_range_of_a_percentage(tmp_path):
    runs = [synthetic.run("plain", seed) for seed in (0, 1)]
    last = [[100.0, 100.0, 100.0, 100.0, 100.0], [100.0, 100.0, 100.0, 100.0, 94.0]]
    runs = [replace(run, matrix=[*run.matrix[:-1], row]) for run, row in zip(runs, last, strict=True)]
    page = write_report(runs, tmp_path, **PAGE)
    row = next(row for row in Reader(page).rows if row[0]["sort"] == "plain")
    # 100 and 98.8 %: the deviation is 1.2 / sqrt(2), and the interval of Student's t is 12.706 * 0.6 on both sides.
    assert row[2]["text"].strip() == "91.78 to 100.00"
    assert "91.78 to 100.00" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("tasks", [1, 2, 20])
def test_any_number_of_tasks_can_be_shown(tmp_path, tasks):
    assert write_report([synthetic.run("plain", 0, tasks=tasks)], tmp_path, **PAGE).is_file()


def test_runs_that_all_failed_or_hold_no_numbers_are_shown(tmp_path):
    nothing = {"conv1": math.nan, "fc1": -1.0, "fc2": math.inf}
    lost = [
        synthetic.run("ewc", 0, status="unstable", reached=0),
        synthetic.run("mas", 0, status="rejected", reached=1),
    ]
    lost += [
        replace(synthetic.run("si", 0), importance=nothing, drift=nothing, cka=nothing, losses=[[math.nan, 0.0]] * 5)
    ]
    lost += [replace(synthetic.run("plain", 0), matrix=[[math.nan] * 5] * 5)]
    page = write_report(lost, tmp_path, **PAGE, baseline="plain")
    assert "did not finish" in page.read_text(encoding="utf-8")


def test_settings_with_different_networks_have_different_labels(tmp_path):
    runs = [synthetic.run("ewc", 0, network=network) for network in ("mlp", "cnn6")]
    html = write_report(runs, tmp_path, **PAGE).read_text(encoding="utf-8")
    assert "ewc 100, network cnn6" in html
    assert '<th scope="col">network</th>' in html


def test_no_results_or_no_baseline_is_refused_in_one_line(results, tmp_path):
    with pytest.raises(MooringError, match="no results to report") as refused:
        write_report([], tmp_path / "report", **PAGE)
    assert "\n" not in str(refused.value)
    with pytest.raises(MooringError, match="baseline 'gem' is not among the runs"):
        write_report(results, tmp_path / "report", **PAGE, baseline="gem")
    assert not (tmp_path / "report").exists()


def test_report_on_a_file_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(MooringError, match=r"cannot write the report to '.*file'") as refused:
        write_report([synthetic.run("plain", 0)], tmp_path / "file", **PAGE)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_an_interrupted_report_leaves_the_old_one(tmp_path, monkeypatch, failure):
    folder = tmp_path / "report"
    before = write_report([synthetic.run("plain", 0)], folder, **PAGE).read_bytes()
    replace_file = os.replace

    def full(scratch, path):
        if path.name == "index.html":
            raise failure
        replace_file(scratch, path)

    monkeypatch.setattr(os, "replace", full)
    expected = MooringError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected, match="No space left" if expected is MooringError else None):
        write_report([synthetic.run("ewc", 0)], folder, **PAGE)
    assert (folder / "index.html").read_bytes() == before
    assert not [path for path in folder.rglob(".*") if path.is_file()], "temporary files must be removed"


def test_a_new_report_takes_its_old_figures_away_and_nothing_else(tmp_path):
    write_report([synthetic.run("plain", 0, stream="old")], tmp_path, **PAGE)
    (tmp_path / "figures" / "mine.svg").write_text("mine")
    (tmp_path / "notes.txt").write_text("mine")
    write_report([synthetic.run("plain", 0, stream="new")], tmp_path, **PAGE)
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert "mine.svg" in names
    assert (tmp_path / "notes.txt").exists()
    assert "new-tasks.svg" in names
    assert not any(name.startswith("old-") for name in names)
