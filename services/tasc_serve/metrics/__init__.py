"""Prometheus metrics: definitions, exposition and discovery."""
