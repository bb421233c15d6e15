"""The reproduction page and the files next to it."""
