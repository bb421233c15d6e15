"""The pieces of `benchmarks/fleet.py`: one file for each thing that is measured."""
