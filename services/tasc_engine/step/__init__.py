"""One step of an engine: who takes part, the verifying forward, and what is committed."""
