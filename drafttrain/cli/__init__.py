"""The command line: configuration, help, error messages, and how commands are launched."""
