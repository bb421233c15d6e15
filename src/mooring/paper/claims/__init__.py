"""The paper's claims, decided by our runs."""
