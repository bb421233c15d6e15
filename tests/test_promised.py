"""The benchmark of what a nat is worth runs in miniature: a table, JSON and a figure, and calibration pays."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "promised.py"


def test_what_is_promised_is_nearer_to_what_happens_once_it_was_measured(tmp_path):
    kept, figure = tmp_path / "found.json", tmp_path / "figure"
    options = ["--stream", "digits", "--estimate", "Kronecker", "--nats", "0.03", "--seeds", "1"]
    command = [sys.executable, "-W", "error", SCRIPT, *options, "--json", kept, "--figure", figure]
    done = subprocess.run(command, check=True, timeout=240, capture_output=True, text=True)
    assert len(done.stdout.splitlines()) == 3
    estimated, calibrated = json.loads(kept.read_text())
    assert not estimated["calibrated"]
    assert calibrated["calibrated"]
    assert estimated["actual"] > 10 * 0.03
    assert calibrated["actual"] < 5 * 0.03
    assert calibrated["accuracy"] > estimated["accuracy"]
    assert all(figure.with_suffix(f".{kind}").stat().st_size > 5000 for kind in ("svg", "png"))
