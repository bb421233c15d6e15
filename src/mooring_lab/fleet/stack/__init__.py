"""The forward pass of many networks of one architecture at once."""
