"""The lowest folder; it imports nothing else of the package: trees, sampling, files, checksums, intervals, errors."""
