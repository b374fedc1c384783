"""Batch jobs over rows with engines in Ray actors. A job survives the death of any process."""
