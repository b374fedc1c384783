"""Forecasts the speed-up of fine-tuning with new tokens, without fine-tuning."""
