"""``python -m jfa`` is ``jfa``."""

import sys

from jfa.cli import main

sys.exit(main())
