"""Small problems of fine-tuning for the gauntlet: an old task that a network knows, and new tasks to learn."""
