"""Run specifications, results, metrics and training options: the bottom layer of the laboratory."""
