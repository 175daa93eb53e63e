"""Drafters of other people: a module per family says how its layouts are known and what becomes of them here."""
