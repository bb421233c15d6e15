"""What Mooring keeps for each parameter: anchors and importances, their storage, and saving and loading them."""
