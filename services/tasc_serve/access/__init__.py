"""Admission of requests and idempotent requests."""
