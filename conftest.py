"""Examples in docstrings are run where the library they show is installed; Avalanche's by a test, for its warnings."""

from importlib.util import find_spec

missing = [library for library in ("lightning", "transformers") if find_spec(library) is None]
collect_ignore = [f"src/mooring/integrations/{library}.py" for library in ("avalanche", *missing)]
