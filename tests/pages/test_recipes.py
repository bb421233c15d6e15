"""Tests of docs/recipes: each notebook is made of its page, runs, and prints what it shows."""

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from processes import Child, free_port, gloo_threads

FOLDER = Path(__file__).parents[2] / "docs" / "recipes"
NOTEBOOKS = runpy.run_path(str(FOLDER / "notebooks.py"))
PAGES = NOTEBOOKS["pages"]()
NUMBER = re.compile(r"\d+(?:\.\d+)?")
TOLERANCES = {"%": 5.0, "nats": 0.05}
"""How far a printed number of a unit may be from the shown one, since rounding differs between machines."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_notebook_is_made_of_its_page_and_in_the_index(page):
    stored = json.loads(page.with_suffix(".ipynb").read_text())
    assert stored == NOTEBOOKS["notebook"](page.read_text()), "run python docs/recipes/notebooks.py"
    assert f"]({page.name})" in (FOLDER / "index.md").read_text()
    assert f"]({page.stem}.ipynb)" in page.read_text()


def test_every_notebook_has_a_page():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == [page.stem for page in PAGES]


def run_notebook(name, folder, monkeypatch, torchrun=None):
    """Run the cells of a notebook in a folder, compare what they print with what is shown, and return their names."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    names: dict = {"__name__": "__main__"}
    for cell in json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]:
        code = "".join(cell["source"])
        if cell["cell_type"] != "code" or is_skipped(code):
            continue
        if code.startswith("%%writefile "):
            head, _, text = code.partition("\n")
            (folder / head.split()[1]).write_text(text)
            continue
        if code.startswith("!"):
            printed = (torchrun or torchrun_in_children)(folder, shlex.split(code[1:]))
        else:
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(code, f"docs/recipes/{name}.ipynb", "exec"), names)
            printed = output.getvalue()
        check_output("".join(line for output in cell["outputs"] for line in output["text"]), printed)
    return names


def is_skipped(code):
    """Whether a cell needs bitsandbytes, and it is not installed."""
    return "import bitsandbytes" in code and find_spec("bitsandbytes") is None


def check_output(shown, printed):
    """Check that every shown line was printed, in this order, with about the same numbers."""
    lines = iter(printed.splitlines())
    for line in shown.splitlines():
        words = NUMBER.sub("0", line)
        match = next((other for other in lines if NUMBER.sub("0", other) == words), None)
        assert match is not None, f"{line!r} is not in {printed}"
        for expected, actual in zip(NUMBER.finditer(line), NUMBER.finditer(match), strict=True):
            unit = line[expected.end() :].split(maxsplit=1)[:1]
            tolerance = TOLERANCES.get(unit[0].strip(",;") if unit else "", 0.0)
            assert float(actual[0]) == pytest.approx(float(expected[0]), abs=tolerance, rel=0), (line, match)


def torchrun_in_children(folder, words):
    """Run what `torchrun --nproc-per-node N FILE` does, in processes that have imported torch already."""
    assert words[:2] == ["torchrun", "--nproc-per-node"]
    env = {"WORLD_SIZE": words[2], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    children = [Child(folder, script, rank, words[3], patience=120, **env) for rank in range(int(words[2]))]
    ended = [child.ended() for child in children]
    assert all(end.status == 0 for end in ended), "\n".join(end.err for end in ended)
    return "".join((folder / f"rank{rank}.txt").read_text() for rank in range(int(words[2])))


def script(rank, file):
    """Run a file as one rank; its output goes to a file of its own.

    A DDP wrapper that is freed after the process group may wait forever, so the group must be gone while names exist.
    """
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    with open(f"rank{rank}.txt", "w") as output, contextlib.redirect_stdout(output):
        names = runpy.run_path(file, run_name="__main__")
    assert not gloo_threads(), f"a variable of {file} keeps the process group: one of {', '.join(names)}"


def real_torchrun(folder, words):
    """Run the command as it is written."""
    command = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    ended = subprocess.run(command, cwd=folder, timeout=240, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_vision_recipe_keeps_old_classes_and_batch_norm(tmp_path, monkeypatch):
    names = run_notebook("vision", tmp_path, monkeypatch)
    accuracy, old, new, training = (names[key] for key in ("accuracy", "old", "new", "training"))
    assert accuracy(names["model"], old & ~training) > accuracy(names["plain"], old & ~training) + 50
    assert accuracy(names["model"], new & ~training) > 70
    assert names["forgotten"].nats <= 0.1 * (1 + 1e-4)
    assert all(map(torch.equal, names["statistics"](names["model"]), names["statistics"](names["base"])))


@pytest.mark.faults  # slow
@pytest.mark.filterwarnings("ignore")  # the libraries warn about each other
def test_trainer_recipe_keeps_what_the_model_knew(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    names = run_notebook("trainer", tmp_path, monkeypatch)
    accuracy = names["accuracy"]
    assert accuracy(names["model"], names["old"]) > accuracy(names["plain"], names["old"]) + 20
    assert accuracy(names["model"], names["new"]) > 70
    assert names["callback"].moor.tasks == 2


@pytest.mark.filterwarnings("ignore::mooring.errors.ReturnedWarning")
def test_detector_recipe_keeps_what_it_knew(tmp_path, monkeypatch):
    names = run_notebook("detector", tmp_path, monkeypatch)
    percent_right, (old, new) = names["percent_right"], names["tests"]
    assert percent_right(names["model"], old) > percent_right(names["plain"], old) + 20
    assert percent_right(names["model"], new) > percent_right(names["base"], new) + 10
    assert names["forgotten"].nats <= 0.1 * (1 + 1e-4)


def test_two_towers_recipe_keeps_the_old_index_working(tmp_path, monkeypatch):
    names = run_notebook("two-towers", tmp_path, monkeypatch)
    right, index, (old, _) = names["right"], names["old_index"], names["tests"]
    assert right(names["model"], index, *old) > right(names["plain"], index, *old) + 30
    assert names["forgotten"].nats <= 0.1 * (1 + 1e-4)


def test_several_gpus_recipe_loads_one_estimate_on_two_ranks(tmp_path, monkeypatch):
    names = run_notebook("gpus", tmp_path, monkeypatch)
    weights, before = torch.load(tmp_path / "new.pt"), torch.load(tmp_path / "known.pt")["model"]
    assert any(not torch.equal(weights[name], before[name]) for name in before)
    names["model"].load_state_dict(weights)
    task = sys.modules.pop("digits_task")
    with torch.no_grad():
        correct = names["model"](task.upright[1400:]).argmax(1) == task.y[1400:]
    assert correct.float().mean() > 0.8  # plain fine-tuning ends below 0.5


@pytest.mark.faults  # slow
def test_several_gpus_recipe_runs_with_torchrun(tmp_path, monkeypatch):
    run_notebook("gpus", tmp_path, monkeypatch, torchrun=real_torchrun)
    del sys.modules["digits_task"]


@pytest.mark.faults  # TRL is slow to import
@pytest.mark.filterwarnings("ignore")  # the libraries warn about each other
def test_lora_recipe_keeps_what_the_model_knew(tmp_path, monkeypatch):
    for library in ("trl", "peft", "datasets"):
        pytest.importorskip(library)
    names = run_notebook("lora", tmp_path, monkeypatch)
    accuracy, old, new = names["accuracy"], names["old"], names["new"]
    pairs = [(names["plain"], names["model"])]
    if find_spec("bitsandbytes"):
        pairs.append((names["quantized_plain"], names["quantized_model"]))
    for plain, moored in pairs:
        assert accuracy(moored, old) > accuracy(plain, old) + 20
        assert accuracy(moored, new) > 70


def test_own_test_set_shows_what_was_kept_and_learned(tmp_path, monkeypatch):
    names = run_notebook("measure", tmp_path, monkeypatch)
    before, after = names["before"], names["after"]
    assert after["upright"][0] > before["upright"][0] - 10
    assert after["turned"][0] > before["turned"][0] + 50
    right = (names["model"](names["tests"]["turned"][0]).argmax(1) == names["tests"]["turned"][1]).double()
    assert after["turned"] == pytest.approx((100 * right.mean().item(), 100 * right.std().item() / len(right) ** 0.5))


LOCAL_TASK = """task: local
dataset_path: json
dataset_kwargs: {data_files: {test: local.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""


@pytest.mark.faults  # slow to import
@pytest.mark.filterwarnings("ignore")  # the libraries warn about each other
def test_lm_evaluation_harness_block_runs_with_a_local_task(tmp_path, monkeypatch):
    tasks = pytest.importorskip("lm_eval.tasks", reason="needs lm_eval")
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    Path("local.yaml").write_text(LOCAL_TASK)
    rows = [{"question": "w1 w2", "choices": ["w3", "w4"], "answer": answer} for answer in (0, 1)]
    Path("local.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(9)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "w0", "eos_token": "w0", "unk_token": "w0"}
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9, n_positions=32)
    names = {
        "model": transformers.GPT2LMHeadModel(config),
        "tokenizer": transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special),
        "manager": tasks.TaskManager(include_path="."),
    }
    (block,) = re.findall(r"```py\n(.*?)```", (FOLDER / "measure.md").read_text(), re.DOTALL)
    block = re.sub(r"tasks = \[.*\]", 'tasks = ["local"]', block).replace("limit=", "task_manager=manager, limit=")
    exec(compile(block, "docs/recipes/measure.md", "exec"), names)
    assert names["results"]["local"]["acc,none"] == 0.5  # one of two equal questions with different answers
