"""The reproduction page and its files."""
