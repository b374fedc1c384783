"""Who may ask and how often; idempotent requests; drain."""
