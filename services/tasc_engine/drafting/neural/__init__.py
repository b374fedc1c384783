"""Neural proposers: draft models on the target's device, and what vocabularies they draft from."""
