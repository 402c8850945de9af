"""``python -m aparte`` is the ``aparte`` command."""

from aparte.cli.app import main

if __name__ == "__main__":
    main()
