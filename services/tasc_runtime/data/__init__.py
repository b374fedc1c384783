"""Rows of files and tables, and the draft index of a corpus that is in no store."""
