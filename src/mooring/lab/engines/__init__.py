"""Engines: what runs a study's fleets, and where."""
