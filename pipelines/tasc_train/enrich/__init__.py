"""Adds frequent n-grams of a task's outputs to a tokenizer as new tokens."""
