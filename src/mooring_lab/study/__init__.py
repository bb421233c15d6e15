"""Studies: comparisons, searches, frontiers and pre-training, and the store of their results."""
