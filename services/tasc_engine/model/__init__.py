"""The target: loaded from a folder, laid out for this device, and called with packed tokens."""
