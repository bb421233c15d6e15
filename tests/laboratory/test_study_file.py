"""A study file has the options of the command line; errors name the file and the key."""

from pathlib import Path

import pytest

from laboratory.one_line import refused
from mooring.errors import MooringError
from mooring_lab.study.comparison import comparison
from mooring_lab.study.study_file import read_study_file

GOOD = """\
methods = ["plain", "ewc"]
seeds = 1
[stream]
name = "digits"
limit = 20
[train]
epochs = 1
"""


@pytest.fixture
def wrong(tmp_path, capsys, monkeypatch):
    """The line that a file with this text is refused with."""

    def ask(text: str | bytes) -> str:
        file = tmp_path / "made.toml"
        file.write_bytes(text.encode() if isinstance(text, str) else text)
        return refused(tmp_path, ["run", "made.toml"], capsys, monkeypatch)

    return ask


# What it says


def test_every_key_is_read(tmp_path):
    file = tmp_path / "whole.toml"
    file.write_text(
        """
study = "kept/here.sqlite"
report = "page"
baseline = "plain"
device = "cpu"
fleet = 3
methods = ["plain", "ewc", "er"]
seeds = [1, 5]

[[stream]]
name = "digits"
per_task = 5
limit = 20

[[stream]]
name = "folder"
data = "images"
per_task = 1

[train]
network = "mlp"
epochs = 2
batch = 5
memory = 10
heads = "fresh"
init = "start.safetensors"
dtype = "float64"

[method.ewc]
strength = [10, 100.0]
lr = 0.1

[method."plain"]
lr = 0.2
"""
    )
    contents = read_study_file(file)
    assert contents.study == tmp_path / "kept" / "here.sqlite"
    assert contents.report == tmp_path / "page"
    assert (contents.baseline, contents.device, contents.fleet) == ("plain", "cpu", 3)
    streams = contents.comparison.pop("stream")
    assert [(options.name, options.per_task, options.data) for options in streams] == [
        ("digits", 5, None),
        ("folder", 1, str(tmp_path / "images")),
    ]
    assert contents.comparison == {
        "methods": ["plain", "ewc", "er"],
        "seeds": [1, 5],
        "network": "mlp",
        "epochs": 2,
        "batch": 5,
        "memory": 10,
        "heads": "fresh",
        "init": str(tmp_path / "start.safetensors"),
        "dtype": "float64",
        "lr": {"ewc": 0.1, "plain": 0.2},
        "strength": {"ewc": [10, 100.0]},
    }
    assert contents.search is None


def test_every_key_of_a_search_is_read(tmp_path):
    (tmp_path / "whole.toml").write_text("[tune]\ntasks = 1\nlrs = [0.1, 0.01]\nstrengths = [1.0]\nseeds = 2\n")
    contents = read_study_file(tmp_path / "whole.toml")
    assert contents.search == {"tasks": 1, "lrs": [0.1, 0.01], "strengths": [1.0], "search_seeds": 2}


def test_default_study_has_the_name_of_its_file(tmp_path):
    (tmp_path / "mine.toml").write_text("")
    assert read_study_file(tmp_path / "mine.toml").study == tmp_path / "mine.sqlite"


def test_home_and_absolute_paths_are_accepted(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    (tmp_path / "mine.toml").write_text('study = "/whole/path.sqlite"\nreport = "~/page"')
    contents = read_study_file(tmp_path / "mine.toml")
    assert (contents.study, contents.report) == (Path("/whole/path.sqlite"), Path("/somewhere/page"))


# Keys that mean nothing

UNKNOWN = {
    "at the top": ("seeds = 1\nsedes = 2\n", "unknown key 'sedes' (did you mean 'seeds'?)"),
    "a table at the top": ("seeds = 1\n\n[trian]\nepochs = 1\n", "unknown key 'trian' (did you mean 'train'?)"),
    "in stream": ('# mine\n[stream]\nname = "digits"\nlimt = 3\n', "unknown key of [stream] 'limt'"),
    "in a second stream": (
        '[[stream]]\nname = "digits"\n[[stream]]\nname = "digits"\npertask = 3\n',
        "unknown key of [stream] 'pertask' (did you mean 'per_task'?)",
    ),
    "in train": ("[train]\nepoch = 1\n", "unknown key of [train] 'epoch' (did you mean 'epochs'?)"),
    "in a method": ("[method.ewc]\nstrenght = 1\n", "unknown key of [method.ewc] 'strenght'"),
    "in tune": ("[tune]\ntasks = 1\nlearning = 1\n", "unknown key of [tune] 'learning'"),
    "with dots": ("train.epoch = 1\n", "unknown key of [train] 'epoch'"),
    "in an inline table": ("train = {epoch = 1}\n", "unknown key of [train] 'epoch'"),
    "in quotes": ('[train]\n"epoch" = 1\n', "unknown key of [train] 'epoch'"),
    "after the same key elsewhere": (
        '[stream]\nname = "digits"\n[train]\nname = "x"\n',
        "unknown key of [train] 'name'",
    ),
    "a method nobody knows": ("seeds = 1\n[method.ewk]\nlr = 1.0\n", "'ewk'"),
}


@pytest.mark.parametrize("where", UNKNOWN)
def test_unknown_key_is_refused_with_its_table(wrong, where):
    text, said = UNKNOWN[where]
    line = wrong(text)
    assert line.startswith("error: made.toml: ") or where == "a method nobody knows"
    assert said in line


# What is no TOML

SYNTAX = {
    "a value that is missing": ("seeds = 1\nmethods =\n", "line 2"),
    "a quote that is missing": ('seeds = 1\n\nbaseline = "plain\n', "line 3"),
    "a key twice": ("seeds = 1\nseeds = 2\n", "line 2"),
    "a table twice": ("[train]\nepochs = 1\n[train]\nbatch = 1\n", "line 3"),
    "words": ("compare everything with everything", "line 1"),
    "bytes that are no text": (b"seeds = 1\nbaseline = '\xff\xfe'", "is not text"),
}


@pytest.mark.parametrize("what", SYNTAX)
def test_what_is_not_toml_is_refused_with_its_line(wrong, what):
    text, said = SYNTAX[what]
    assert said in wrong(text)


def test_file_that_is_missing_is_reported_in_one_line(tmp_path, capsys, monkeypatch):
    assert "No such file" in refused(tmp_path, ["run", "missing.toml"], capsys, monkeypatch)


def test_folder_is_reported_in_one_line(tmp_path, capsys, monkeypatch):
    assert "directory" in refused(tmp_path, ["run", "."], capsys, monkeypatch)


# Values of another kind: everywhere, each refused with a line that names the key


def top(*lines: str) -> str:
    return "\n".join(lines) + "\n" + GOOD.split("\n", 2)[2]


def stream(*lines: str) -> str:
    named = "" if any(line.startswith("name") for line in lines) else 'name = "digits"\n'
    return f'methods = ["plain"]\nseeds = 1\n[stream]\n{named}' + "\n".join(lines)


def folder(*lines: str) -> str:
    return stream('name = "folder"', 'data = "."', *lines)


def train(*lines: str) -> str:
    return 'methods = ["plain", "er"]\nseeds = 1\n[train]\n' + "\n".join(lines)


def method(*lines: str) -> str:
    return 'methods = ["plain", "ewc"]\nseeds = 1\n[method.ewc]\n' + "\n".join(lines)


def search(*lines: str) -> str:
    return GOOD + "[tune]\n" + "\n".join(lines)


KINDS = {
    "study": [top("study = 5"), top("study = true"), "[study]\na = 1\n", top('study = ["a"]')],
    "report": [top("report = 5"), top("report = true")],
    "baseline": [top("baseline = 5"), top('baseline = ["plain"]')],
    "device": [top("device = 0"), top('device = "nonsense"'), top('device = "meta"')],
    "fleet": [top('fleet = "5"'), top("fleet = 0"), top("fleet = 1.5"), top("fleet = true"), top("fleet = [1]")],
    "methods": [top("methods = 5"), top("methods = [5]"), top("methods = [['plain']]"), "[methods]\nplain = 1\n"],
    "seeds": [
        top('seeds = "5"'),
        top("seeds = 0"),
        top("seeds = -1"),
        top("seeds = 1.5"),
        top("seeds = true"),
        top("seeds = []"),
        top("seeds = [0.5]"),
        top("seeds = [-1]"),
        top("seeds = [[1]]"),
        "[seeds]\na = 1\n",
    ],
    "stream": ['stream = "digits"\n', "stream = 5\n", "stream = []\n", "stream = [5]\n", 'stream = ["digits"]\n'],
    "name": [stream("name = 5"), stream('name = ["digits"]'), "[stream.name]\na = 1\n", stream("name = true")],
    "data": [stream('name = "folder"', "per_task = 1", f"data = {wrong}") for wrong in ("5", "true", '["a"]')],
    "per_task": [stream('per_task = "2"'), stream("per_task = 0"), stream("per_task = 2.0"), stream("per_task = true")],
    "tasks": [stream('tasks = "2"'), stream("tasks = 0"), stream("tasks = [1]")],
    "skip": [stream('skip = "2"'), stream("skip = -1"), stream("skip = 9")],
    "shuffle": [stream('shuffle = "a"'), stream("shuffle = -1")],
    "seed": [stream('name = "digits-permuted"', 'seed = "a"'), stream('name = "digits-permuted"', "seed = -1")],
    "degrees": [stream('name = "digits-rotated"', 'degrees = "a"'), stream('name = "digits-rotated"', "degrees = nan")],
    "limit": [stream('limit = "2"'), stream("limit = 0"), stream("limit = 1.5"), "[stream.limit]\na = 1\n"],
    "size": [folder("per_task = 1", 'size = "32"'), folder("per_task = 1", "size = 0")],
    "channels": [folder("per_task = 1", 'channels = "3"'), folder("per_task = 1", "channels = 2")],
    "label": [folder("per_task = 1", "label = 5")],
    "skip_broken": [folder("per_task = 1", 'skip_broken = "no"'), folder("per_task = 1", "skip_broken = 5")],
    "train": ["train = 5\n", "[[train]]\nepochs = 1\n", 'train = "mlp"\n'],
    "network": [train("network = 5"), train('network = ["mlp"]'), train('network = "mpl"'), "[train.network]\na = 1\n"],
    "lr": [
        train('lr = "0.1"'),
        train("lr = -0.1"),
        train("lr = nan"),
        train("lr = inf"),
        train("lr = true"),
        train('lr = ["a"]'),
        train("lr = [[0.1]]"),
        train("lr = []"),
        method('lr = "x"'),
        method("lr = -1"),
        method("lr = []"),
        method("[method.ewc.lr]\na = 1"),
    ],
    "epochs": [train('epochs = "1"'), train("epochs = 0"), train("epochs = 1.0"), "[train.epochs]\na = 1\n"],
    "batch": [train('batch = "1"'), train("batch = -1"), train("batch = 2.5")],
    "optimizer": [train("optimizer = 1"), train('optimizer = "adam"'), train('optimizer = ["sgd"]')],
    "schedule": [train("schedule = true"), train('schedule = "linear"'), train('schedule = ["cosine"]')],
    "momentum": [train('momentum = "a"'), train("momentum = 2"), train("momentum = true"), train("momentum = [0.9]")],
    "weight_decay": [train('weight_decay = "a"'), train("weight_decay = -1")],
    "memory": [train('memory = "a"'), train("memory = 0"), train("memory = -1"), train("memory = 1.5")],
    "heads": [train("heads = 5"), train('heads = "new"'), train('heads = ["fresh"]')],
    "init": [train("init = 5"), train("init = true")],
    "dtype": [train("dtype = 32"), train('dtype = "int8"'), train('dtype = "float16"')],
    "method": ["method = 5\n", "[[method]]\nlr = 1\n", 'method = "ewc"\n'],
    "ewc": ["methods = ['ewc']\n[method]\newc = 5\n", "methods = ['ewc']\n[[method.ewc]]\nlr = 1\n"],
    "strength": [
        method('strength = "x"'),
        method("strength = -1"),
        method("strength = inf"),
        method("strength = true"),
        method("strength = []"),
        method("strength = ['1']"),
        method("strength = {a = 1}"),
        'methods = ["plain"]\n[method.plain]\nstrength = 1.0\n',
    ],
    "tune": ["tune = 5\n", "[[tune]]\ntasks = 1\n", 'tune = "all"\n'],
    "tasks ": [search('tasks = "3"'), search("tasks = 0"), search("tasks = 1.5"), search("[tune.tasks]\na = 1")],
    "lr ": [search('lrs = "0.1"'), search("lrs = 0.1"), search('lrs = ["a"]'), search("lrs = [-1.0]")],
    "strength ": [search("strengths = 1.0"), search('strengths = ["a"]'), search("strengths = [-1.0]")],
    "seeds ": [search('seeds = "1"'), search("seeds = 1.5"), search("seeds = [0.5]"), search("seeds = [-1]")],
}


@pytest.mark.parametrize(
    ("key", "text"),
    [pytest.param(key.strip(), text, id=f"{key}-{n}") for key, texts in KINDS.items() for n, text in enumerate(texts)],
)
def test_value_of_another_kind_is_refused_by_the_name_of_its_key(wrong, tmp_path, key, text):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").write_bytes(b"not read before the rest is right")
    line = wrong(text)
    assert (key if key != "seeds" else "seed") in line, line


def test_lr_of_a_method_comes_before_that_of_train(tmp_path):
    text = train("lr = 0.1", "[method.vanilla]", "lr = [0.2, 0.3]").replace("plain", "uniform")
    (tmp_path / "made.toml").write_text(text)
    asked = comparison(**read_study_file(tmp_path / "made.toml").comparison)
    specs = asked.specs(asked.streams[0][1], "", "", "")
    assert [(spec.method, spec.lr) for spec in specs] == [("uniform", 0.2), ("uniform", 0.3), ("er", 0.1)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (method("strength = 1.0"), "strength of [method.ewc] means nothing beside [tune]"),
        (method("lr = 1.0"), "lr of [method.ewc] means nothing beside [tune]"),
        (train("lr = 1.0"), "lr of [train] means nothing beside [tune]"),
    ],
)
def test_settings_that_a_search_ignores_are_refused(wrong, text, said):
    line = wrong(text + "\n[tune]\ntasks = 1\n")
    assert said in line
    assert line.endswith("s in [tune]")


def test_baseline_that_is_not_compared_is_refused(wrong):
    assert "the baseline 'er' is not among" in wrong(top('baseline = "er"', "seeds = 1"))
    assert "the baseline 'er' is not among" in wrong(top('baseline = "er"', "seeds = 1") + "[tune]\ntasks = 1\n")


def test_good_file_is_not_refused(tmp_path, monkeypatch):
    """So that the refusals above are of what they seem to be."""
    for text in (GOOD, top(), stream(), train(), method(), search()):
        (tmp_path / "good.toml").write_text(text)
        comparison(**read_study_file(tmp_path / "good.toml").comparison)


@pytest.mark.parametrize("line", ['study = "a\\u0000"', 'report = "a\\u0000"', '[train]\ninit = "a\\u0000"'])
def test_path_that_no_file_can_have_is_refused(tmp_path, line):
    path = tmp_path / "study.toml"
    path.write_text(line)
    with pytest.raises(MooringError, match=r"study.toml: \w+ must be a path, not 'a\\x00'$"):
        read_study_file(path)
