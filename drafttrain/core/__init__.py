"""What needs nothing else of the package: trees, sampling, files, checksums, intervals, errors."""
