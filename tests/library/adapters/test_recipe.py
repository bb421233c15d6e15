"""Tests that the recipe for TRL in docs/adapters.md runs, and continues from its checkpoint."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[3] / "docs" / "adapters.md").read_text()


@pytest.mark.faults  # TRL is slow to import
@pytest.mark.filterwarnings("ignore")  # the libraries warn about each other, and random weights know nothing
def test_recipe_runs_and_is_resumed(tmp_path, monkeypatch):
    for library in ("trl", "peft", "datasets"):
        pytest.importorskip(library, reason=f"needs {library}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    (recipe,) = (block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "from trl" in block)
    first: dict = {"__name__": "__main__"}
    exec(compile(recipe, "docs/adapters.md", "exec"), first)
    assert first["trainer"].state.global_step == 4
    again: dict = {"__name__": "__main__"}
    exec(compile(recipe.replace("max_steps=4", "max_steps=6"), "docs/adapters.md", "exec"), again)
    assert again["trainer"].state.global_step == 6
    assert again["callback"].moor.tasks == 2
