"""`python -m evertrain.cli ...` for an installation without the script."""

import sys

from evertrain.cli.main import main

sys.exit(main())
