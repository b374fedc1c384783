"""Corpora of tasks, and answers on their way into them."""
