"""The data plane: a Ray single controller that trains one RuntimeConfig."""
