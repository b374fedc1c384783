"""A package, so that the service it shares ends with its last test."""
