"""Output monitors that act: they watch a text while it is decoded, and end it or fall back to plain decoding."""
