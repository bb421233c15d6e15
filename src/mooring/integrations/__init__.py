"""Mooring in the training stacks that people use; each module needs its library, and the core needs none of them."""
