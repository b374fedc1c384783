"""Observers beside the requests: shadow checks and collected answers."""
