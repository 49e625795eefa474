"""`python -m noria.cli` is the command `noria`."""

import sys

from noria.cli import main

if __name__ == "__main__":
    sys.exit(main())
