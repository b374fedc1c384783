"""API keys and idempotent requests."""
