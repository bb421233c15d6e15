"""Tests that the blocks of docs/integrations.md run, if their library is installed."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[3] / "docs" / "integrations.md").read_text()
BLOCKS = re.findall(r"^## (\w+)\n(?:(?!^## ).)*?```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(("stack", "block"), BLOCKS, ids=[stack for stack, _ in BLOCKS])
@pytest.mark.filterwarnings("ignore")  # the libraries warn about each other
def test_documented_block_runs(stack, block, tmp_path, monkeypatch):
    if stack == "Avalanche":
        pytest.importorskip("torchvision", reason="avalanche-lib needs torchvision", exc_type=ImportError)
    pytest.importorskip(stack.lower(), reason=f"needs {stack}", exc_type=ImportError)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, f"docs/integrations.md, {stack}", "exec"), {"__name__": "__main__"})


def test_every_library_has_a_documented_block():
    assert [stack for stack, _ in BLOCKS] == ["transformers", "Lightning", "Accelerate", "PEFT", "Avalanche"]
    assert PAGE.count("```python") == len(BLOCKS)
