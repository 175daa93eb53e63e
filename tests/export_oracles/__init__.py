"""Independent readers of exported directories, one file per format: the oracle of the tests.

Each reads a directory as its stacks do, with their names and conventions, and drafts in plain torch. Apart from `parts` and
`layer`, which they share, readers import nothing from the exporter, so that an error there cannot repeat here. The exporter's
own check reads files by the format's importer, which has the same tables of names as the writer. What both have wrong is found
here.

`check.py` compares a written directory with the golden drafts; `tests.exports.written` calls it for every export.
"""
