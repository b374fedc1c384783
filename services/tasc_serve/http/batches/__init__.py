"""The endpoints for files and batches."""
