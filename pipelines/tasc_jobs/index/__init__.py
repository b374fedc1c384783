"""Builds the draft index of a task in these steps: ingest, tokenise, sort, publish."""
