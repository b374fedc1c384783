"""Batch jobs over rows, with engines in Ray actors, that survive the end of any process."""
