"""Fleets: many runs of one shape, trained together as one stacked computation."""
