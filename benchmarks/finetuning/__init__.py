"""The models and measurements of `finetuning_cost.py`."""
