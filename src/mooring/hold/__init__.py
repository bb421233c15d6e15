"""Budgets that are measured: the divergence from the original model on held-out data, and what is done about it."""
