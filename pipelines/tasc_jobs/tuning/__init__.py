"""The gain of a task from drafting: replay, tune, forecast, and their reports. No model is run."""
