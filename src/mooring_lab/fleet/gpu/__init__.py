"""GPU implementations of the stacked layers and of elementwise rules over runs."""
