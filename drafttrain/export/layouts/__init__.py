"""Writers of exported files, one module per family."""
