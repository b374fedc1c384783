"""The commands of `tasc` that train. Each is imported only when it is called."""
