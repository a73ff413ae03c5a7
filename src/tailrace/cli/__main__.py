"""``python -m tailrace.cli`` is the same as ``tailrace``."""

from tailrace.cli import main

if __name__ == "__main__":
    main()
