"""Run specifications, results, metrics and training settings: the bottom layer of `mooring_lab`."""
