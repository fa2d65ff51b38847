"""``python -m torch_pi2.cli`` is the ``torch-pi2`` command."""

import sys

from torch_pi2.cli import main

sys.exit(main())
