"""What a model is: one transformer for all families, its configuration, the plain forward pass."""
