"""What is run by hand, and by the GPU suites: decoding speed, all families side by side."""
