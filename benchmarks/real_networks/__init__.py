"""Fine-tuning on networks that were trained before: the problems, the methods and their results."""
