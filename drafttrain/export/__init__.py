"""Export checkpoints to serving stacks, check them, and import other projects' drafters."""
