"""Import other people's drafters: one file per family recognises its layouts and converts them."""
