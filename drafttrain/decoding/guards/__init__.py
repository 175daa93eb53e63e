"""Output monitors: they watch a text while it is decoded and may end it."""
