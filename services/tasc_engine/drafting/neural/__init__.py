"""Neural proposers: draft models on the target's device, and the vocabularies they draft from."""
