"""Engines: what trains the fleets of a study, on this machine or on a cluster."""
