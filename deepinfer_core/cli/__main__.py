"""``python -m deepinfer_core.cli``."""

import sys

from . import main

sys.exit(main())
