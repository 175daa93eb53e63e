"""Random faults against every command: kills, damaged files, malformed data, hostile input, request storms."""
