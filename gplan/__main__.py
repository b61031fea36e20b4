"""`python -m gplan`, also under torchrun."""

from gplan.cli import main

if __name__ == "__main__":
    main()
