"""Builds a running engine from a task's record, and handles its inputs and outputs."""
