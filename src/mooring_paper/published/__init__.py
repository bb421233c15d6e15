"""The numbers that the paper reports."""
