"""The paper's tables: accuracy, forgetting and the grid search."""
