"""Scripts that run in an engine's own Python; they import nothing of this package."""
