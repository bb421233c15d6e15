"""The parts of benchmarks/language.py: texts, the model, methods that train it, and what it keeps and learns."""
