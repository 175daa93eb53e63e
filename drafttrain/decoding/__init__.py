"""Speculative decoding: requests, scheduler, decode steps, acceptance."""
