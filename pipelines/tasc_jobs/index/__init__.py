"""Builds the draft index of a task: ingest, tokenise, sort, publish."""
