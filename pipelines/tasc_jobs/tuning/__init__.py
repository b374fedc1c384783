"""Estimates a task's gain from drafting: replay, tune, forecast, and their reports.

No model is run.
"""
