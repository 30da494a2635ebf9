"""Model clients: one module for each provider."""
