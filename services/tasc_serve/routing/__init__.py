"""Which replica answers a call, and what happens when it dies."""
