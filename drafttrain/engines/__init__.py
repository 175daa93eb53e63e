"""Serving engines as processes or servers, for `verify` and `measure`; `scripts/` run in the engine's own Python."""
