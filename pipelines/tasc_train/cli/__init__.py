"""The commands of `tasc` that train; `tasc` imports one of them when it is called."""
