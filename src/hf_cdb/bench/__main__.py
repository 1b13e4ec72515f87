"""`python -m hf_cdb.bench COMMAND`: the same as `hf-cdb bench COMMAND`."""

import sys

from ..cli import main

sys.exit(main(["bench", *sys.argv[1:]]))
