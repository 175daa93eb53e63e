"""The interfaces of target and drafter, and their shared parts: batches, KV cache, attention, layers."""
