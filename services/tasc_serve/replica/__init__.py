"""A replica: an engine on its thread, admission, and live updates."""
