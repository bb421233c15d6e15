"""Recompute every cell and claim of a reproduction from its runs, without the library, and compare.

Reads `runs.json` and `findings.json`, which `mooring paper all --out FOLDER` writes. The definitions are written again
from the paper and from the claims' own sentences. Prints one line for each disagreement; exits with 1 if there is one.

    python benchmarks/recompute.py reproduction
    python benchmarks/recompute.py reproduction --json
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

from recomputation.claim_comparison import compare_claims
from recomputation.comparison import Disagreement
from recomputation.run_records import Reproduction
from recomputation.table_cells import compare_tables, grid_rows, published_rows, table_rows

TABLES = {
    "grids": grid_rows,
    "table1": partial(table_rows, target="table1"),
    "resnet": partial(table_rows, target="resnet"),
    "as-published": published_rows,
    "stand-in": partial(table_rows, target="stand-in"),
}
"""The expected rows of each target with tables."""
FIGURES = ("fig-negative", "fig-violations", "fig-importance", "fig-cka", "roots", "effective-lr")
TARGETS = (*TABLES, *FIGURES, "claims")
"""The targets whose runs and tables are read."""


def main(arguments: list[str] | None = None) -> int:
    """Recompute the cells and claims of a folder and print the disagreements."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the folder that `mooring paper all` wrote")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    options = parser.parse_args(arguments)
    try:
        reproduction = Reproduction(options.folder)
    except (OSError, ValueError, KeyError) as error:
        print(f"error: {options.folder} is not a folder of `mooring paper all`: {error!r}", file=sys.stderr)
        return 2
    if missing := [target for target in TARGETS if target not in reproduction.findings]:
        print(f"error: findings.json lacks {', '.join(missing)}: run `mooring paper all`", file=sys.stderr)
        return 2
    cells, disagreements = 0, list[Disagreement]()
    for target, expected_rows in TABLES.items():
        count, differing = compare_tables(reproduction, target, expected_rows(reproduction))
        cells += count
        disagreements += differing
    claims, differing_claims = compare_claims(reproduction)
    disagreements += differing_claims
    if options.json:
        found = [{"where": d.where, "written": d.written, "recomputed": d.recomputed} for d in disagreements]
        print(json.dumps({"cells": cells, "claims": claims, "disagreements": found}, indent=1))
    else:
        for disagreement in disagreements:
            print(disagreement)
        print(f"{cells} cells and {claims} claims recomputed, {len(disagreements)} disagree")
    return 1 if disagreements else 0


if __name__ == "__main__":
    sys.exit(main())
