"""Builds the engine of a task: versions, draft index, drafter, step costs."""
