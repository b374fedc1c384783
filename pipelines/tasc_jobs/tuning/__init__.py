"""Estimates a task's gain from drafting by replays, and improves draft settings and indexes.

A model is run only for measurements that the user requests.
"""
