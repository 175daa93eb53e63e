"""Independent readers of exported directories, one file per layout.

Each reads a directory as its stacks do, with their names and conventions, and drafts in plain torch. Apart from `parts` and
`layer`, which they share, readers import nothing from the exporter, so that an error there cannot repeat here.
"""
