"""The paper, reproduced: each of its tables, figures and claims is a target, and `mooring paper` runs them."""
