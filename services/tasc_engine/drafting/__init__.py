"""Makes the drafts of a step: a proposer that may fail, and the hidden states that it reads."""
