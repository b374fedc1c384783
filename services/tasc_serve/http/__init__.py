"""The HTTP API: reads and validates requests, and writes responses."""
