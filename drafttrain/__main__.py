"""`python -m drafttrain` is the `drafttrain` command; torchrun needs it."""

from drafttrain.cli import main

if __name__ == "__main__":
    main()
