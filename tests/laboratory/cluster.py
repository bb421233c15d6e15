"""A Ray cluster for tests, in a process of its own: a head without cores, and nodes that can be killed."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from importlib.util import find_spec

import pytest

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason='Ray is not installed: pip install "mooring-lab[ray]"')


class Cluster:
    """Nodes by the process id of what runs each."""

    def __init__(self, process: subprocess.Popen) -> None:
        self.process = process
        self.address = self._receive()["address"]
        self.nodes: list[int] = []

    def add(self, cpus: int = 1) -> int:
        self._send({"add": cpus})
        self.nodes.append(self._receive()["node"])
        return self.nodes[-1]

    def kill(self, node: int) -> None:
        """As if its plug was pulled: what runs the node and everything on it."""
        self.nodes.remove(node)
        for process_id in [node, *workers(node)]:
            os.kill(process_id, signal.SIGKILL)
        self._send({"forget": node})
        self._receive()

    def _send(self, what: dict) -> None:
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def _receive(self) -> dict:
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise AssertionError("the cluster is gone")


def workers(node: int, kind: bytes = b"ray::") -> list[int]:
    """The processes that work on a node."""
    processes = []
    for entry in os.listdir("/proc"):
        try:
            with open(f"/proc/{entry}/stat") as stat, open(f"/proc/{entry}/cmdline", "rb") as cmdline:
                parent, name = int(stat.read().rpartition(")")[2].split()[1]), cmdline.read()
        except (OSError, ValueError):
            continue
        if parent == node and name.startswith(kind):
            processes.append(int(entry))
    return processes


@contextmanager
def cluster(*cpus: int):
    """A cluster with nodes of so many cores each, gone afterwards."""
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
    process = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        nodes = Cluster(process)
        for count in cpus:
            nodes.add(count)
        yield nodes
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


def main() -> None:
    from ray.cluster_utils import Cluster as Nodes

    quick = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
    head = {"num_cpus": 0, "object_store_memory": 10**8, "_system_config": quick, "include_dashboard": False}
    nodes = Nodes(initialize_head=True, head_node_args=head)
    known = {}
    print(json.dumps({"address": nodes.address}), flush=True)
    try:
        for line in sys.stdin:
            asked = json.loads(line)
            if "add" in asked:
                node = nodes.add_node(num_cpus=asked["add"], object_store_memory=10**8)
                (raylet,) = node.all_processes["raylet"]
                known[raylet.process.pid] = node
                print(json.dumps({"node": raylet.process.pid}), flush=True)
            else:
                nodes.remove_node(known.pop(asked["forget"]), allow_graceful=False)
                print(json.dumps({"forgot": asked["forget"]}), flush=True)
    finally:
        nodes.shutdown()


if __name__ == "__main__":
    main()
