"""`python -m hf_cdb`: the same as `hf-cdb`."""

import sys

from .cli import main

sys.exit(main())
