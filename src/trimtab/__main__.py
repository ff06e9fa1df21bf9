"""`python -m trimtab` is the command line."""

from trimtab.cli.app import main

if __name__ == "__main__":
    main()
