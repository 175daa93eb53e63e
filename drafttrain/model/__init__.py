"""The interfaces of target and drafter, and what both are made of: batches, KV cache, attention, layers."""
