"""`python -m kvexp`."""

from kvexp.interrupt import in_one_line

if __name__ == "__main__":
    with in_one_line():
        from kvexp.cli import main

        main()
