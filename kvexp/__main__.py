"""`python -m kvexp`."""

from kvexp.cli import main

if __name__ == "__main__":
    main()
