"""Processes that are killed, asked to stop, or compete for a study: no run is lost, and results are the same."""

import os
import random
import signal
import time
from contextlib import suppress

import pytest

from laboratory.cluster import cluster, needs_ray, workers
from laboratory.faults.small import ASKED, QUICK, often, table, times, uninterrupted
from laboratory.mooring_command import command
from laboratory.test_kill import rows, saved
from processes import Child, wait_for

pytestmark = pytest.mark.faults
PATIENCE = 240
KILLS = 50


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return uninterrupted(tmp_path_factory.mktemp("whole"), ASKED)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return uninterrupted(tmp_path_factory.mktemp("quick"), QUICK)


@needs_ray
def test_fifty_kills_of_drivers_workers_and_nodes_at_random_moments(tmp_path, whole, fault_table):
    """A study that is done before the last kill is compared, and another one begun."""
    chance, kills = random.Random(8), {"driver": 0, "worker": 0, "node": 0}
    with cluster(1, 1) as ray_cluster:
        ray = ["--engine", "ray", "--address", ray_cluster.address]
        study, driver = 0, None

        def begin() -> Child:
            return Child(tmp_path / str(study), often, 0.1, *ASKED, *ray, patience=PATIENCE, RAY_AUTH_MODE="disabled")

        def at_work() -> list[int]:
            return [pid for node in ray_cluster.nodes for pid in workers(node, b"ray::_run_remote_job")]

        while sum(kills.values()) < KILLS:
            driver = driver or begin()
            kind = chance.choices(list(kills), (5, 4, 1))[0]
            if kind != "driver" or chance.random() < 0.7:  # some are killed while they set out
                wait_for(at_work, driver)
            time.sleep(chance.uniform(0, 2))
            if not driver.running():
                ended = driver.ended()
                assert ended.status == 0, ended.err
                fault_table.add("a study done between kills", 1, whole, rows(tmp_path / str(study)))
                study, driver = study + 1, None
            elif kind == "driver":
                driver.kill()
                kills[kind] += driver.ended().status == -signal.SIGKILL
                driver = None
            elif kind == "worker":
                with suppress(ProcessLookupError, IndexError):
                    os.kill(chance.choice(at_work()), signal.SIGKILL)
                    kills[kind] += 1
            else:
                ray_cluster.kill(chance.choice(ray_cluster.nodes))
                ray_cluster.add()
                kills[kind] += 1
        ended = (driver or begin()).ended()
        assert ended.status == 0, ended.err
        assert "Traceback" not in ended.err
    stored = rows(tmp_path / str(study))
    for kind, count in kills.items():
        assert count, f"no {kind} was ever killed"
        fault_table.add(f"kill -9 of a {kind} (Ray)", count, whole, stored)
    assert table(tmp_path / str(study)) == table(whole.folder)


def test_kills_at_random_moments_with_the_local_engine(tmp_path, whole, fault_table):
    chance, kills = random.Random(1), 0
    for _ in range(20):
        child = Child(tmp_path, often, 0.05, *ASKED)
        time.sleep(chance.uniform(0.2, 1.5))
        child.kill()
        status = child.ended().status
        kills += status == -signal.SIGKILL
        if status == 0:
            break
    assert kills, "it was never killed"
    assert Child(tmp_path, command, *ASKED, patience=PATIENCE).ended().status == 0
    fault_table.add("kill -9 of the driver (local)", kills, whole, rows(tmp_path))


@pytest.mark.parametrize("engine", ["local", pytest.param("ray", marks=needs_ray)])
def test_sigterm_finishes_the_checkpoint_and_exits_0_with_how_to_continue(tmp_path, whole, fault_table, engine):
    asked, chance = 0, random.Random(3)
    more = [] if engine == "local" else ["--engine", "ray"]
    for _ in range(8 if engine == "local" else 3):
        before = times(tmp_path)
        child = Child(tmp_path, command, *ASKED, *more, patience=PATIENCE)
        wait_for(lambda before=before: times(tmp_path).items() - before.items(), child)
        time.sleep(chance.uniform(0, 0.2))
        child.kill(signal.SIGTERM)
        ended = child.ended()
        assert ended.status == 0, ended.err
        assert "Traceback" not in ended.err
        if ended.out:
            break  # it was done
        last = ended.err.splitlines()[-1]
        assert last.endswith("everything so far is saved, and the same command continues from here")
        asked += 1
    assert asked, "it was never asked"
    assert Child(tmp_path, command, *ASKED, patience=PATIENCE).ended().status == 0
    fault_table.add(f"SIGTERM ({engine})", asked, whole, rows(tmp_path))


def as_a_job(*arguments: str) -> int:
    """The command and every process that it starts, in a group of their own."""
    os.setsid()
    return command(*arguments)


@needs_ray
def test_sigterm_to_every_process_of_a_job_ends_its_cluster_and_the_command_says_how_to_continue(
    tmp_path, whole, fault_table
):
    """As `timeout`, a batch system or a service manager sends it: Ray's own processes end at once."""
    child = Child(tmp_path, as_a_job, *ASKED, "--engine", "ray", patience=PATIENCE)
    assert wait_for(lambda: saved(tmp_path), child)
    os.killpg(child.process.pid, signal.SIGTERM)
    ended = child.ended()
    assert (ended.status, ended.out) == (0, ""), ended.err
    assert "Traceback" not in ended.err
    assert ended.err.splitlines()[-1].endswith("everything so far is saved, and the same command continues from here")
    assert Child(tmp_path, command, *ASKED, patience=PATIENCE).ended().status == 0
    fault_table.add("SIGTERM to a whole job (Ray)", 1, whole, rows(tmp_path))


def test_eight_drivers_on_one_study_take_turns_or_are_refused(tmp_path, quick, fault_table):
    asked = [*QUICK[:-1], "../study.sqlite"]
    every = [
        Child(tmp_path / str(n), command, *asked, *(["--wait"] if n % 2 else []), patience=PATIENCE) for n in range(8)
    ]
    ends = [child.ended() for child in every]
    assert {end.status for end in ends} <= {0, 2}
    for end in ends:
        if end.status:
            assert end.err.count("\n") == 1
            assert "is being run by process" in end.err
    trained = [end for end in ends if "to train" in end.err]
    assert len(trained) == 1
    fault_table.add("two drivers on one study", len(every) - 1, quick, rows(tmp_path))


def jumping(*arguments: str) -> int:
    """The command, while the clock jumps a day ahead or back whenever it is read."""
    import datetime as dates

    from mooring_lab.study import store

    chance = random.Random(5)
    clock = time.time
    time.time = lambda: clock() + chance.choice((-86_400, 0, 86_400))
    time.time_ns = lambda: int(time.time() * 1e9)
    store._now = lambda: dates.datetime.fromtimestamp(time.time(), dates.timezone.utc).isoformat()
    return command(*arguments)


def test_clock_that_jumps_changes_nothing(tmp_path, quick, fault_table):
    for _ in range(2):
        child = Child(tmp_path, jumping, *QUICK)
        wait_for(lambda: saved(tmp_path), child)
        child.kill()
        child.ended()
    assert Child(tmp_path, jumping, *QUICK, patience=PATIENCE).ended().status == 0
    fault_table.add("the clock jumping", 3, quick, rows(tmp_path))


def test_diverged_runs_are_reported_and_kept_through_kills(tmp_path, quick, fault_table):
    lost = [row for row in quick if row[4] == "unstable"]
    assert lost, "none diverged"
    for moment in range(4):
        child = Child(tmp_path, command, *QUICK)
        wait_for(lambda: saved(tmp_path), child)
        time.sleep(0.05 * moment)
        child.kill()
        child.ended()
    assert Child(tmp_path, command, *QUICK, patience=PATIENCE).ended().status == 0
    fault_table.add("a run that diverges", len(lost), quick, rows(tmp_path))
