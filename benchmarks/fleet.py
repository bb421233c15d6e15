"""Measure the speed and the cost of a fleet, with one mode per measurement.

step     many runs in a fleet, compared with the same runs one by one in a plain eager loop (the default)
tflops   floating-point operations per second, compared with a large matrix product
first    seconds to the first training step: with empty caches, with filled caches, in a running process
scaling  model-steps per second for several sizes of the fleet, as a figure with the device's limit
paper    the time of the paper's CIFAR-100 table and of its grid search
tiles    the time of each convolution with other tile sizes
peer     the same training through Avalanche

Both sides of a ratio are measured in the same run. Step times are those of the second task, without its first steps
and without evaluation. Tests check that loop and fleet end with the same weights.

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
    """Run one mode and print its results as text, as JSON, or both."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    if not argv or (argv[0] not in MODES and argv[0] not in ("-h", "--help")):
        argv.insert(0, "step")
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    modes = parser.add_subparsers(dest="mode", metavar="MODE", help=", ".join(MODES))
    for name, mode in MODES.items():
        mode.add_options(modes.add_parser(name, description=mode.__doc__, formatter_class=formatter))
    options = parser.parse_args(argv)
    try:
        results = MODES[options.mode].run(checked(options))
    except MooringError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json == "-":
        print(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
