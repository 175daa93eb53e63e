"""The options of each family, one file each. They import no torch, so that a command composes its configuration quickly."""
