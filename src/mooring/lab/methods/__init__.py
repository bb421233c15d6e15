"""Methods: one small file per family, listed by `mooring methods`."""

from mooring.lab.methods.method import Method
from mooring.lab.methods.registry import METHODS, find_method, resolve_methods

__all__ = ["METHODS", "Method", "find_method", "resolve_methods"]
