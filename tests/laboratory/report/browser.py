"""Open a page in a real browser without a driver: an outer page runs a script on it and stores its result."""

import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
AROUND = """<!DOCTYPE html><meta charset="utf-8"><title>around</title>
<iframe id="inner" src="{page}" width="{width}" height="900" style="border:0"></iframe><pre id="findings"></pre>
<script>
document.getElementById("inner").addEventListener("load", () => {{
  const inner = document.getElementById("inner").contentWindow;
  const page = inner.document;
  let findings;
  try {{ findings = (() => {{ {script} }})(); }} catch (error) {{ findings = {{ error: String(error) }}; }}
  document.getElementById("findings").textContent = JSON.stringify(findings);
}});
</script>"""


@dataclass(frozen=True)
class Seen:
    """What the script returned, and what the browser's console said."""

    findings: Any
    console: list[str]


def look(page: Path, script: str, *, width: int = 1200, dark: bool = False) -> Seen:
    """Open a page this wide and run a script on it; `inner` is its window and `page` its document there."""
    around = page.parent / "around.html"
    around.write_text(AROUND.format(page=page.name, width=width, script=script))
    done = dom(
        around.as_uri(),
        page.parent / "browser",
        "--allow-file-access-from-files",
        f"--window-size={max(width, 500) + 50},1000",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
    )
    match = re.search(r'<pre id="findings">(.+?)</pre>', done.stdout, re.DOTALL)
    assert match, f"the browser left nothing: {done.stderr[-2000:]}"
    findings = json.loads(html.unescape(match[1]))
    assert not (isinstance(findings, dict) and "error" in findings), findings
    return Seen(findings, [line for line in done.stderr.splitlines() if "CONSOLE" in line])


def dom(address: str, profile: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """An address opened and left alone for some seconds: its document on stdout, its console on stderr."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no browser is installed: run `make browser`")
    usual = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "--virtual-time-budget=5000"]
    command = [browser, *usual, "--enable-logging=stderr", f"--user-data-dir={profile}", *options, address]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)
