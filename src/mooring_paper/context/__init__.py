"""What all targets share: scale, study, runs, statistics over seeds, cells and results."""
