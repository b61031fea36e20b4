"""`python -m gplan`, also under torchrun."""

from __future__ import annotations

from gplan.cli import main

if __name__ == "__main__":
    main()
