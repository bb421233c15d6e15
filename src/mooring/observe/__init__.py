"""Forward-hook observers of a model's outputs and layers."""
