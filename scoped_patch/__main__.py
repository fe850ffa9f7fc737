"""`python -m scoped_patch`."""

import sys

from .cli import main

sys.exit(main())
