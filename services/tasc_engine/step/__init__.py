"""One step of an engine: its plan, the verifying forward pass, and the accepted tokens."""
