"""`python -m graphkv` is the command line."""

import sys

from graphkv.cli import main

sys.exit(main())
