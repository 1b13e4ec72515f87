"""`python -m eval.run --config configs/tiny-ouro.yaml --output DIR`: as `hf-cdb eval`."""

import sys

from hf_cdb.cli import main

if __name__ == "__main__":
    sys.exit(main(["eval", *sys.argv[1:]]))
