"""Trains models for a task, and forecasts and evaluates the gain."""
