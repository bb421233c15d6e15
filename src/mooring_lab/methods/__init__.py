"""Continual-learning methods by name, one file per family; `mooring methods` lists them."""

from mooring_lab.methods.method import Method
from mooring_lab.methods.registry import METHODS, find_method, resolve_methods

__all__ = ["METHODS", "Method", "find_method", "resolve_methods"]
