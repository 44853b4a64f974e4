"""`python -m kvexp.validate`."""

from kvexp.validate.command import main

if __name__ == "__main__":
    main()
