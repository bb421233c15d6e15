"""The stored reproduction, and the script that reads it."""

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
STORED = ROOT / "docs" / "reproduction"
sys.path.append(str(ROOT / "benchmarks"))
stored_page = importlib.import_module("stored_page")
StoredPage = stored_page.StoredPage
