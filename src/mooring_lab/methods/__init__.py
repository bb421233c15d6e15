"""Continual-learning methods, one folder per family; `mooring methods` lists them."""

from mooring_lab.methods.registry import resolve_methods
from mooring_lab.model.known_methods import METHODS, find_method
from mooring_lab.model.method import Method

__all__ = ["METHODS", "Method", "find_method", "resolve_methods"]
