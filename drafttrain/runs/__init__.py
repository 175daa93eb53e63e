"""A run as an object: options, directory, environment, placement of the target, data, progress."""
