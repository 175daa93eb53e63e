"""`python -m drafttrain` is the `drafttrain` command; torchrun needs it."""

from drafttrain.cli.main import main

if __name__ == "__main__":
    main()
