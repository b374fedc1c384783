"""Observers beside the requests: shadow checks, collected answers, drift, store and queue."""
