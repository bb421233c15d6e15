"""The Ray engine gives the results of the local engine, even if workers and machines are lost."""

import inspect
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from laboratory.cluster import cluster, needs_ray, workers
from laboratory.engines import ASKED
from laboratory.mooring_command import command
from laboratory.small import class_stream
from laboratory.test_kill import DIGITS, rows, saved
from mooring.errors import MooringError
from mooring.rules import EWC, Proximal
from mooring_lab.engines.runner import RunContext
from mooring_lab.engines.worker import Finished, Job, run_job
from mooring_lab.methods import METHODS, Method
from mooring_lab.methods.registry import own_methods
from mooring_lab.model.spec import RunSpec
from mooring_lab.study.store import Store
from mooring_lab.study.study import Study
from processes import Child, Ended, wait_for

HERE = "laboratory.test_ray"


# Without Ray


def test_without_ray_one_line_says_how_to_install_it(tmp_path, monkeypatch, capsys):
    from mooring_lab.cli import main

    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "--methods", "plain", "--seeds", "1", "--engine", "ray"]) == 2
    output = capsys.readouterr()
    assert (output.out, output.err) == (
        "",
        'error: --engine ray needs Ray: pip install "mooring-lab[ray]", or leave --engine out\n',
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"engine": "rai"}, "unknown engine 'rai' (did you mean 'ray'?); allowed: local, ray"),
        ({"engine": "local", "share": 0.0}, "share=0.0 is not allowed: give a number from 0.01"),
        ({"engine": "local", "share": 0.5}, "--share 0.5 is for --engine ray: give that too, or leave the share out"),
        pytest.param(
            {"engine": "ray", "share": 2.0}, "share=2.0 is not allowed: give a number from 0.01", marks=needs_ray
        ),
        ({"engine": "local", "address": "auto"}, "--address auto is for --engine ray: give that too, or leave"),
    ],
    ids=["unknown", "no share", "share without ray", "share above 1", "address without ray"],
)
def test_impossible_engine_is_refused_in_one_line(tmp_path, options, line):
    with pytest.raises(MooringError) as caught:
        Study(tmp_path / "study.sqlite", **options)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


# The user's own methods


def gentle() -> Method:
    return Method("gentle", "a method", importance=lambda seed: EWC(), pull=lambda s: Proximal(s), strength=10.0)


@needs_ray
def test_worker_is_given_the_methods_that_it_does_not_know(tmp_path, monkeypatch):
    from ray import cloudpickle

    monkeypatch.setitem(METHODS, "gentle", gentle())
    stream = class_stream(2)
    spec = RunSpec(stream.name, stream.fingerprint, "gentle", 0, strength=10.0, epochs=1)
    methods = own_methods(["plain", "gentle"])
    assert [method.name for method in methods] == ["gentle"]
    sent = cloudpickle.dumps(Job((spec,), "cpu", 60.0, False, tmp_path, beacon="", methods=methods))
    monkeypatch.delitem(METHODS, "gentle")  # as in a process of its own
    job = cloudpickle.loads(sent)
    (finished,) = (message for message in run_job(job, stream, {}) if isinstance(message, Finished))
    assert [(result.spec.method, result.status) for result in finished.results] == [("gentle", "finished")]


def compare_with_own_method(address: str) -> int:
    """Compare a method that only this process knows, on a cluster."""
    METHODS["gentle"] = gentle()
    study = Study("study.sqlite", engine="ray", address=address)
    rows = study.compare(stream="digits", methods="plain,gentle", seeds=1, epochs=1)
    print([row.label for row in rows if row.metrics])
    return 0


@pytest.mark.faults  # slow
@needs_ray
def test_method_registered_in_python_is_trained_on_a_cluster(tmp_path, two):
    from laboratory.test_ray import compare_with_own_method as target

    ended = Child(tmp_path, target, two.address, patience=180, RAY_AUTH_MODE="disabled").ended()
    check_finished(ended)
    assert ended.out.splitlines()[-1] == "['plain', 'gentle 10']"


# On a cluster of two nodes with a core each


@pytest.fixture(scope="module")
def two():
    with cluster(1, 1) as nodes:
        yield nodes


def start(folder: Path, nodes, *more: str, target=command, **env: str) -> Child:
    ray = ["--engine", "ray", "--address", nodes.address]
    return Child(folder, target, *ASKED, *ray, *more, patience=180, RAY_AUTH_MODE="disabled", **env)


def check_finished(ended: Ended) -> str:
    assert ended.status == 0, ended.err
    assert "Traceback" not in ended.err
    return ended.err


@pytest.mark.faults  # slow
@needs_ray
def test_results_equal_the_local_engines_exactly_and_come_in_fleets_by_shape(tmp_path, two, alone_here):
    err = check_finished(start(tmp_path, two).ended())
    assert rows(tmp_path) == alone_here
    assert err.startswith("10 runs to train in 4 fleets\n")  # three shapes, the largest in two: a core for each
    assert sum(": done" in line for line in err.splitlines()) == 4
    assert saved(tmp_path) == []
    assert not (tmp_path / "study.sqlite.fleets").exists()


@pytest.mark.faults
@needs_ray
def test_deterministic_fleets_share_a_core_and_equal_the_local_engine(tmp_path, two, alone_here):
    err = check_finished(start(tmp_path, two, "--deterministic", "--share", "0.25").ended())
    assert rows(tmp_path) == alone_here
    assert err.startswith("10 runs to train in 3 fleets\n")  # by shape alone, however many cores there are
    results = list(Store(tmp_path / "study.sqlite").results())
    assert {result.versions.get("deterministic") for result in results} == {"yes"}


def shared_gpu(folder: str) -> int:
    """How many fleets are on a GPU at once that this machine says it has, and what they see of it."""
    import ray

    from mooring_lab.engines.ray import RayEngine

    ray.init("local", num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False, logging_level="error")

    def seen(wanted: int, patience: float) -> tuple[str, int]:
        """What a fleet sees of the GPU, and how many are on it; it waits for others, not for ever."""
        file, end = Path(folder) / f"{os.getpid()}.here", time.monotonic() + patience
        file.touch()
        while (here := len(list(Path(folder).glob("*.here")))) < wanted:
            if time.monotonic() > end:
                file.unlink()
                break
            time.sleep(0.01)
        return os.environ["CUDA_VISIBLE_DEVICES"], here

    for share, wanted, patience in ((1.0, 2, 1.0), (0.3, 3, 60.0)):
        engine = RayEngine(RunContext({}, {}, "cuda"), Path(folder), share=share)
        task = ray.remote(**engine.resources())(seen)
        observed = ray.get([task.remote(wanted, patience) for _ in range(3)])
        print(json.dumps([sorted({gpu for gpu, _ in observed}), max(here for _, here in observed), engine._slots(ray)]))
    return 0


@pytest.mark.faults
@needs_ray
def test_fleet_has_a_gpu_for_itself_unless_a_share_is_asked_for(tmp_path):
    from laboratory.test_ray import shared_gpu as target

    ended = Child(tmp_path, target, str(tmp_path), patience=120).ended()
    assert ended.status == 0, ended.err
    assert [json.loads(line) for line in ended.out.splitlines()[-2:]] == [[["0"], 1, 1], [["0"], 3, 3]]


@needs_ray
def test_finished_study_needs_no_cluster(tmp_path, alone_here):
    assert Child(tmp_path, command, *ASKED).ended().status == 0
    ended = Child(tmp_path, command, *ASKED, "--engine", "ray", "--address", "127.0.0.1:1").ended()
    assert (ended.status, ended.err) == (0, "")


@needs_ray
@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["--address", "ray://127.0.0.1:1"], "error: ray://127.0.0.1:1 is a client's address: "),
        (["--address", "127.0.0.1:1"], "error: no Ray cluster at 127.0.0.1:1: "),
    ],
    ids=["client", "nobody"],
)
def test_missing_cluster_is_reported_in_one_line(tmp_path, more, line):
    ended = Child(tmp_path, command, *ASKED, "--engine", "ray", *more, patience=180).ended()
    assert (ended.status, ended.out) == (2, ""), ended.err
    assert ended.err.splitlines()[-1].startswith(line), ended.err


@pytest.mark.faults  # slow
@needs_ray
def test_missing_gpu_is_reported_in_one_line(tmp_path, two):
    for device, line in (("cuda", "error: the Ray cluster has no GPU: "), ("cuda:1", "error: --engine ray chooses")):
        ended = start(tmp_path, two, "--device", device, "--dtype", "float32").ended()
        assert ended.status == 2
        assert ended.err.startswith(line)
        assert ended.err.count("\n") == 1


@needs_ray
@pytest.mark.faults
@pytest.mark.parametrize(
    ("number", "status"),
    [
        pytest.param(signal.SIGINT, 130, id="Ctrl-C"),
        pytest.param(signal.SIGTERM, 0, id="SIGTERM"),
    ],
)
def test_stop_signal_saves_reports_in_one_line_and_continues(tmp_path, two, alone_here, number, status):
    child = start(tmp_path, two, "--epochs", "400")
    assert wait_for(lambda: saved(tmp_path), child)
    child.kill(number)
    ended = child.ended()
    assert (ended.status, ended.out) == (status, ""), ended.err
    last = ended.err.splitlines()[-1]
    assert last == "interrupted; everything so far is saved, and the same command continues from here"
    assert "Traceback" not in ended.err
    assert saved(tmp_path)
    assert not list((tmp_path / "study.sqlite.fleets").glob(".*"))


@pytest.mark.faults
@needs_ray
def test_killed_worker_and_a_killed_node_are_replaced_and_nothing_is_lost(tmp_path, two, fault_table):
    long = [*ASKED, "--epochs", "60"]
    (tmp_path / "alone").mkdir()
    alone = Child(tmp_path / "alone", command, *long)
    assert alone.ended().status == 0
    child = start(tmp_path, two, "--epochs", "60")
    assert wait_for(lambda: saved(tmp_path), child)
    lost = next(pid for node in two.nodes for pid in workers(node))
    os.kill(lost, signal.SIGKILL)
    assert wait_for(lambda: "lost" in child.err.read_text(), child)
    two.kill(two.nodes[0])
    two.add()
    err = check_finished(child.ended())
    assert "go on from step" in err
    fault_table.add("a worker and a node lost, one study (Ray)", 2, rows(tmp_path / "alone"), rows(tmp_path))


def crowded(shape: tuple[int, int, int]) -> torch.nn.Module:
    """A network of which more than two do not fit: the system kills, or PyTorch refuses."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "initial_networks":
        frame = frame.f_back
    if frame is not None and len(frame.f_locals["specs"]) > 2 and "RAY_JOB_ID" in os.environ:
        if Path(os.environ["MOORING_TEST_MEMORY"]).read_text() == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise torch.OutOfMemoryError("CUDA out of memory")
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(shape[1] * shape[2], 9), torch.nn.Tanh())


@pytest.mark.faults
@needs_ray
@pytest.mark.parametrize("how", ["killed", "refused"])
def test_fleet_that_does_not_fit_goes_on_in_halves(tmp_path, two, fault_table, how):
    (tmp_path / "how.txt").write_text(how)
    asked = ["compare", "--methods", "plain", *DIGITS, "--seeds", "4", "--network", f"{HERE}:crowded", "--fleet", "4"]
    asked += ["--study", "study.sqlite"]
    alone = Child(tmp_path / "alone", command, *asked)
    assert alone.ended().status == 0, alone.err.read_text()
    ray = ["--engine", "ray", "--address", two.address]
    env = {"RAY_AUTH_MODE": "disabled", "MOORING_TEST_MEMORY": str(tmp_path / "how.txt")}
    ended = Child(tmp_path, in_worker_environment, json.dumps([*asked, *ray]), patience=180, **env).ended()
    assert "halves" in check_finished(ended) or "going on with 2 at a time" in ended.err
    fault_table.add("out of memory in a fleet (Ray)", 1, rows(tmp_path / "alone"), rows(tmp_path))


def in_worker_environment(asked: str) -> int:
    """The command, with a variable that workers see too."""
    import ray

    name = "MOORING_TEST_MEMORY"
    arguments = json.loads(asked)
    environment = {"env_vars": {name: os.environ[name]}}
    ray.init(arguments[-1], runtime_env=environment, log_to_driver=False, logging_level="error")
    return command(*arguments)


@pytest.mark.faults
@needs_ray
def test_error_of_a_run_is_reported_in_one_line_and_the_others_are_saved(tmp_path, two):
    (tmp_path / "study.sqlite.fleets").write_text("in the way")
    ended = start(tmp_path, two).ended()
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.splitlines()[-1].startswith("error: cannot write in ")
    assert "Traceback" not in ended.err
