"""The target model: loads it from a folder, prepares it for a device, runs packed tokens."""
