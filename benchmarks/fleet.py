"""What a fleet saves, and what it costs: one mode for each thing that is measured.

step     many runs together, over the same runs one after the other through a plain eager loop (the default)
tflops   floating-point operations a second, beside a large matrix product
first    seconds to the first training step: caches empty, caches kept, in a running process
scaling  model-steps a second against the size of the fleet, as a picture with the device's limit
paper    the paper's CIFAR-100 table and its grid search, from the call to the results
tiles    each convolution in other tiles than those it is computed in
peer     the same training through Avalanche

Ratios are of two things measured in the same run. Times of steps are of the second task's, without its first ones;
scoring is left out on both sides. Tests assert that loop and fleet end at the same weights.

    python benchmarks/fleet.py                                          # 32 runs of the demo's network, on the CPU
    python benchmarks/fleet.py --network cnn6 --runs 128 --batch 10 --device cuda --dtype tf32,bf16
    python benchmarks/fleet.py scaling --device cuda --plot scaling.png --json scaling.json
    python benchmarks/fleet.py paper --help
"""

import argparse
import json
import sys
from collections.abc import Sequence

from fleets import first, paper, peer, scaling, step, tflops, tiles
from fleets.output import checked

from mooring.errors import MooringError

MODES = {"step": step, "tflops": tflops, "first": first, "scaling": scaling}
MODES |= {"paper": paper, "peer": peer, "tiles": tiles}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for, and say it in lines for people, in JSON, or both."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or (given[0] not in MODES and given[0] not in ("-h", "--help")):
        given.insert(0, "step")
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how)
    modes = parser.add_subparsers(dest="mode", metavar="MODE", help=", ".join(MODES))
    for name, mode in MODES.items():
        mode.add_options(modes.add_parser(name, description=mode.__doc__, formatter_class=how))
    options = parser.parse_args(given)
    try:
        found = MODES[options.mode].run(checked(options))
    except MooringError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json == "-":
        print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
