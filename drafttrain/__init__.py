"""drafttrain: train drafters for speculative decoding, and measure what they are worth."""

__version__ = "0.1.0"
