"""Observers beside the requests: shadow checks, collected answers, store and queue."""
