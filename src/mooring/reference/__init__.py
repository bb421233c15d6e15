"""Importance and budgets estimated from reference data, without changing the model."""
