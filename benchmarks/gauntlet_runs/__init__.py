"""The cells of the gauntlet: their design, how they are run, and what is computed from their rows."""
