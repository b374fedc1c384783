"""Loads the target model from a folder, prepares it for a device, and runs packed tokens."""
