"""Connectors that vLLM loads by name. Only this folder is on the path of vLLM's Python."""
