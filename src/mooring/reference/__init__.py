"""Reference data: reading and checking it, and the importance and divergences computed from it."""
