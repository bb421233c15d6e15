"""The laboratory: streams of tasks, networks and metrics to study forgetting with. Needs the extra `mooring[lab]`."""
