"""`python -m gplan`, also under torchrun."""

from gplan.cli import main

main()
