"""Trains draft models on answers of a target model."""
