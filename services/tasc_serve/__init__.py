"""The Ray Serve application: gateway, replicas, metrics, settings."""
