"""Ways to train adapters that keep what the base model knows, side by side."""
