"""Independent readers of exported directories, one file per layout.

Each reads a directory as the stacks do that it is for, by their names and conventions, and drafts in plain torch. They import
nothing of drafttrain but what they share, `parts` and `layer`: what the exporter gets wrong they cannot get wrong with it.
"""
