"""Serving engines as processes or servers, for `verify` and for `measure`."""
