"""Single changes that test why a cell differs from the paper's."""
