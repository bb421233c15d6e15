"""Stability of penalties, drift of models, and checks for non-finite values."""
