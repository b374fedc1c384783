"""Trains models for a task, and forecasts and evaluates what that gains."""
