"""The HTTP API: requests are read and validated, responses are written."""
