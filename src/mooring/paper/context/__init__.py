"""What every target of the reproduction shares: the study, its scale, its cells and its results."""
