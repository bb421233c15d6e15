"""Methods: one small file per family, listed by `mooring methods`."""

from mooring.lab.methods.method import Method
from mooring.lab.methods.registry import METHODS, find, resolve

__all__ = ["METHODS", "Method", "find", "resolve"]
