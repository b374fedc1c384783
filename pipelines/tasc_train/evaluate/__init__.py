"""Evaluates a model on a task's rows: answer quality and speed."""
