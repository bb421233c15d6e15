"""The parts of `benchmarks/recompute.py`, which import nothing of `mooring`."""
