"""The paper's claims, tested by our runs."""
