"""Observers of finished answers: shadow checks and the collection of answers."""
