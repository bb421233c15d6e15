"""docs/projections.md: its tables and sentences are written here from the stored numbers.

The three streams are those of the frontier's page. A finer choice and variants of the methods are in projections.json,
as `mooring frontier --json` prints them. Free directions and processor times have files of their own.
"""

import importlib
import json
import re

import pytest
import torch

from mooring_lab.model.metrics import paired_difference
from mooring_lab.networks.inputs import normalize_pixels
from mooring_lab.streams import digits
from pages.test_frontier_page import DOCS, FIFTY, MEASURED, OURS, STREAMS, accuracies_of, number

PAGE = (DOCS / "projections.md").read_text()
TEXT = re.sub(r"\s+", " ", PAGE)
EXTRA = json.loads((DOCS / "figures" / "projections.json").read_text())
FREE = [json.loads(line) for line in (DOCS / "figures" / "free-directions.jsonl").read_text().splitlines()]
TIMES = json.loads((DOCS / "figures" / "projection-time.json").read_text())
PROJECTIONS = ("gpm", "nscl", "owm", "ftp", "tpgm")
ALPHA = "\N{GREEK SMALL LETTER ALPHA}"
SHOWN = ("joint", OURS, *PROJECTIONS, "plain")


def table(stream):
    """Return the table of a stream, the most accurate method first."""
    lines = ["| method | strength | accuracy % | forgetting | learned |", "| --- | --- | --- | --- | --- |"]
    for name, row in sorted(MEASURED[stream].methods.items(), key=lambda item: -item[1].accuracy):
        if name in SHOWN:
            strength = "" if row.strength is None else number(row.strength)
            others = ["" if value is None else f"{value:.1f}" for value in (row.forgetting, row.learned)]
            cells = [f"`{name}`", strength, f"{row.accuracy:.1f} ± {row.std:.1f}", *others]
            lines.append(re.sub(r"\|  (?=\|)", "| ", f"| {' | '.join(cells)} |"))
    return "\n".join(lines)


def extra(kind, stream, name):
    """Return a method of the stored file, which names one of benchmarks/projection_variants.py with a fingerprint."""
    stored = EXTRA[kind][stream]
    assert set(stored["search_seeds"]).isdisjoint(stored["seeds"])
    (sweep,) = (method for method in stored["methods"] if re.search(rf"(^|:){name}(@|$)", method["method"]))
    return sweep


def accuracy(sweep):
    numbers = sweep["best"]["metrics"]["accuracy"]
    return numbers["mean"], numbers["std"]


def finer_lead(stream):
    ours, theirs = (extra("finer", stream, name)["accuracies"] for name in ("owm", OURS))
    return paired_difference(list(ours.values()), [theirs[seed] for seed in ours])


def finer_row(stream):
    cells = []
    for name in (OURS, "owm"):
        sweep = extra("finer", stream, name)
        mean, std = accuracy(sweep)
        cells += [number(sweep["best"]["strength"]), f"{mean:.1f} ± {std:.1f}"]
    lead = finer_lead(stream)
    return f"| {stream} | {' | '.join(cells)} | {lead.mean:+.1f} [{lead.low:+.1f}, {lead.high:+.1f}] |"


def finer_table():
    head = f"| stream | nats | `{OURS}` | `{ALPHA}` | `owm` | `owm` ahead by |\n| --- | --- | --- | --- | --- | --- |"
    return "\n".join([head, finer_row("permutations"), finer_row("rotations")])


def neither_is_ahead_on_rotations():
    lead = finer_lead("rotations")
    assert lead.low < 0 < lead.high
    assert finer_lead("permutations").high < 0
    low, high = (min(extra("finer", "rotations", name)["accuracies"].values()) for name in (OURS, "owm"))
    return (
        "On rotations neither is surely ahead. The budget differs more between seeds: its worst of ten has "
        f"{low:.1f} %, that of `owm` {high:.1f} %."
    )


def two_digits_and_fifty_permutations():
    lead = MEASURED["digits"].lead(OURS, "owm")
    owm, ours = FIFTY.methods["owm"], FIFTY.methods[OURS]
    return (
        f"On ten digits the budget is ahead by {lead.mean:.1f} [{lead.low:+.1f}, {lead.high:+.1f}]. On fifty "
        f"permutations `owm` has {owm.accuracy:.1f} ± {owm.std:.1f} % (three seeds, five epochs), where the budget has "
        f"[{ours.accuracy:.1f} %](frontier.md#fifty-permutations)."
    )


def a_cut():
    cut = [accuracy(extra("variants", stream, "CUT"))[0] for stream in ("rotations", "permutations")]
    _, permuted, rotated = accuracies_of("owm")
    return (
        f"1 below `{ALPHA}` and 0 above, has {cut[0]:.1f} % on rotations and {cut[1]:.1f} % on permutations, "
        f"where `owm` has {rotated:.1f} and {permuted:.1f} %."
    )


def fewer_samples():
    values = [accuracy(extra("variants", stream, "SAMPLED"))[0] for stream in ("rotations", "permutations")]
    return f"The number of samples matters little: 300 instead of all give {values[0]:.1f} and {values[1]:.1f} %."


def observed_in_every_step():
    every = [accuracy(extra("variants", stream, "EVERY_STEP")) for stream in ("rotations", "permutations")]
    ours = [MEASURED[stream].methods[OURS] for stream in ("rotations", "permutations")]
    rotated, permuted = (f"{mean:.1f} ± {std:.1f}" for mean, std in every)
    first, second = (f"{row.accuracy:.1f} ± {row.std:.1f}" for row in ours)
    return (
        f"If `{OURS}` observes layers in every step instead of every fourth, it has {rotated} % on rotations and "
        f"{permuted} % on permutations, instead of {first} and {second} %: no clear difference."
    )


def near_to_freezing():
    frozen = accuracies_of("frozen-after-first")[0]
    others = [accuracies_of(name)[0] for name in PROJECTIONS if name != "owm"]
    assert max(abs(value - frozen) for value in others) < 0.5
    return (
        "All projections but `owm` are about as accurate as [freezing after the first task]"
        f"(frontier.md#three-streams-of-digits), {frozen:.1f} %."
    )


def uses_of_gpm():
    return f"It came to {accuracies_of('gpm')[1]:.1f} % on five permutations of the digits"


def uses_of_nscl():
    return f"It kept almost everything on ten digits, and has {accuracies_of('nscl')[1]:.1f} % on five permutations"


def uses_of_owm():
    owm, ours = FIFTY.methods["owm"].accuracy, FIFTY.methods[OURS].accuracy
    assert all(max(PROJECTIONS, key=lambda name: MEASURED[s].methods[name].accuracy) == "owm" for s in STREAMS)
    return f"on fifty permutations it has {owm:.1f} %, the budget {ours:.1f} %."


def uses_of_ftp():
    return f"on permutations FTP came to {accuracies_of('ftp')[1]:.1f} %."


def miniature_of_gpm():
    gpm, ewc = (MEASURED["permutations"].methods[name] for name in ("gpm", "ewc"))
    return (
        f"the same two layers: {gpm.accuracy:.1f} ± {gpm.std:.1f} %, forgetting {gpm.forgetting:.1f}; `ewc` "
        f"[{ewc.accuracy:.1f} %](frontier.md#three-streams-of-digits), together {accuracies_of('joint')[1]:.1f} %."
    )


def miniature_of_owm():
    owm = MEASURED["permutations"].methods["owm"]
    others = [MEASURED["permutations"].methods[name].forgetting for name in PROJECTIONS if name != "owm"]
    assert owm.forgetting < min(others)
    return f"{owm.accuracy:.1f} ± {owm.std:.1f} %, forgetting {owm.forgetting:.1f}: it forgets the least, as published,"


def miniature_of_nscl():
    row = MEASURED["digits"].methods["nscl"]
    return (
        f"Ten digits in five tasks: {row.accuracy:.1f} %, forgetting {row.forgetting:.1f}. It hardly forgets, as "
        f"published; on permutations it has {accuracies_of('nscl')[1]:.1f} %, see below."
    )


def miniature_of_tpgm():
    tpgm, plain = (MEASURED["permutations"].methods[name] for name in ("tpgm", "plain"))
    more = 100 * (tpgm.accuracy / plain.accuracy - 1)
    return (
        f"On permutations {tpgm.accuracy:.1f} % against {plain.accuracy:.1f} % of plain fine-tuning over all tasks, "
        f"{more:.0f} % more; each new task is learned to {tpgm.learned:.1f} % instead of {plain.learned:.1f} %."
    )


def smaller_share_of_gpm():
    (row,) = (r for r in MEASURED["permutations"].by_name["gpm"]["dial"] if r["strength"] == 0.003)
    assert row["forgetting"] > MEASURED["permutations"].methods["gpm"].forgetting
    return f"learns less, and forgets no less: {row['forgetting']:.1f} points at 0.003."


def free_directions(stream, name):
    """Return the strength of a method, which is the chosen one, and its layers from the input to the output."""
    (row,) = (row for row in FREE if (row["stream"], row["method"]) == (stream, name))
    assert row["seeds"] == 5
    assert row["strength"] == MEASURED[stream].methods[name].strength
    return number(row["strength"]), list(row["layers"].values())


def span(counts):
    return f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else f"{counts[0]}"


def free_directions_of_gpm():
    share, layers = free_directions("permutations", "gpm")
    first, second, third, fourth = map(span, layers[0]["free"])
    assert [layer["inputs"] for layer in layers] == [65, 101, 101]
    return (
        f"With `gpm {share}` the first layer has {first} free directions of 65 after one permutation, then {second}, "
        f"{third} and {fourth}. After the fourth permutation the second layer has {span(layers[1]['free'][-1])} of "
        f"101, and the last one {span(layers[2]['free'][-1])}."
    )


def free_directions_of_nscl():
    ratio, layers = free_directions("permutations", "nscl")
    first, second, third, fourth = map(span, layers[0]["free"])
    return (
        f"At a ratio of {ratio} the first layer has {first} free directions after one permutation, then {second}, "
        f"{third} and {fourth} of {layers[0]['inputs']}: protection ends."
    )


def nscl_under_rotations():
    ratio, layers = free_directions("rotations", "nscl")
    counts = [count for task in layers[0]["free"] for count in task]
    return (
        f"Under rotations {span(counts)} of {layers[0]['inputs']} stay free at a ratio of {ratio}, and `nscl` comes to "
        f"{accuracies_of('nscl')[2]:.1f} %."
    )


def miniature_of_ftp():
    ftp, tpgm = (min(turn[name] for turn in TIMES["turns"]) for name in ("ftp", "tpgm"))
    assert (TIMES["tasks"], TIMES["runs"], TIMES["epochs"], len(TIMES["turns"])) == (5, 5, 1, 9)
    return (
        "Five permutations of the digits, one epoch each, five runs in a fleet on one core, the fastest of nine turns: "
        f"{ftp:.2f} s of processor time against {tpgm:.2f} s with `tpgm`, {100 * (1 - ftp / tpgm):.0f} % less, as "
        "`ftp` needs no second pass."
    )


def ftp_and_uniform():
    ftp, uniform = (accuracies_of(name)[1] for name in ("ftp", "uniform"))
    assert ftp < uniform
    return f"On permutations `ftp` is below a uniform penalty ([{uniform:.1f} %](frontier.md#three-streams-of-digits))."


SENTENCES = [
    neither_is_ahead_on_rotations,
    two_digits_and_fifty_permutations,
    a_cut,
    fewer_samples,
    observed_in_every_step,
    near_to_freezing,
    uses_of_gpm,
    uses_of_nscl,
    uses_of_owm,
    uses_of_ftp,
    miniature_of_gpm,
    miniature_of_owm,
    miniature_of_nscl,
    miniature_of_tpgm,
    miniature_of_ftp,
    smaller_share_of_gpm,
    free_directions_of_gpm,
    free_directions_of_nscl,
    nscl_under_rotations,
    ftp_and_uniform,
]


@pytest.mark.parametrize("write", SENTENCES, ids=lambda write: write.__name__)
def test_sentence_of_the_page_is_what_the_numbers_say(write):
    assert write() in TEXT


@pytest.mark.parametrize("stream", STREAMS)
def test_table_of_a_stream_is_what_was_stored(stream):
    assert table(stream) in PAGE


def test_table_of_the_finer_choice_is_what_was_stored():
    assert finer_table() in PAGE


def test_page_of_the_frontier_quotes_the_finer_choice():
    lead, first = finer_lead("rotations"), MEASURED["rotations"].lead("owm", OURS)
    assert (
        f"On rotations `owm` is {first.mean:.1f} points ahead with these seeds, and {lead.mean:.1f} [{lead.low:+.1f}, "
        f"{lead.high:+.1f}] with a finer dial and ten other seeds:"
    ) in re.sub(r"\s+", " ", (DOCS / "frontier.md").read_text())


def test_variant_with_a_cut_frees_the_directions_of_small_inputs(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS.parent / "benchmarks"))
    variant = importlib.import_module("projection_variants").CUT.plugin.make(0.1)
    basis, _ = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    moment = basis @ torch.diag(torch.tensor([0.0, 0.5, 4.0], dtype=torch.float64)) @ basis.T  # of 10 samples
    torch.testing.assert_close(variant.update({}, moment, 10)["projection"], basis[:, :2] @ basis[:, :2].T)


@pytest.fixture
def benchmark_named(monkeypatch):
    """Return a function that imports a script of the benchmarks."""
    monkeypatch.syspath_prepend(str(DOCS.parent / "benchmarks"))
    return importlib.import_module


def test_free_directions_of_the_first_layer_are_small_eigenvalues_of_the_pixels(
    benchmark_named, tmp_path, capsys, monkeypatch
):
    bench, file = benchmark_named("free_directions"), tmp_path / "free.jsonl"
    monkeypatch.setattr(bench, "CASES", [("permutations", "nscl", 1000.0)])
    assert bench.main(["--seeds", "1", "--tasks", "2", "--epochs", "1", "--json", str(file)]) == 0
    row = json.loads(file.read_text())
    images = normalize_pixels(digits().train.images, torch.float64).flatten(1)
    inputs = torch.cat([images, torch.ones(len(images), 1, dtype=torch.float64)], 1)
    values = torch.linalg.eigvalsh(inputs.T @ inputs)
    smallest = values[values > 1e-9 * values[-1]].min()
    expected = int((values <= 1000 * smallest).sum())
    assert row["layers"]["backbone.1"] == {"inputs": 65, "free": [[expected]]}
    assert f"permutations, nscl 1000, backbone.1: {expected} to {expected} of 65" in capsys.readouterr().out


def test_processor_time_is_measured_in_every_turn(benchmark_named, tmp_path, capsys):
    file = tmp_path / "time.json"
    brief = ["--runs", "1", "--tasks", "2", "--turns", "1"]
    assert benchmark_named("projection_time").main([*brief, "--json", str(file)]) == 0
    (turn,) = json.loads(file.read_text())["turns"]
    assert turn.keys() == {"plain", "ftp", "tpgm"}
    assert f"tpgm {turn['tpgm']:8.2f} s" in capsys.readouterr().out
