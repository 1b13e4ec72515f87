"""`python -m eval.parity --config configs/tiny-ouro.yaml --output DIR`: fails where quality is lost.

Exit status 0; 1 where the engine at full depth is not stock generation, or the default loses more than the
configuration's tolerances with 95 % confidence; 2 after an error.
"""

import argparse
import sys

from hf_cdb.evaluation import parity


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="eval.parity", description=__doc__)
    parity.add_arguments(parser)
    try:
        failures = parity.run(parser.parse_args(arguments))
    except (ValueError, OSError) as error:
        print(f"eval.parity: error: {error}", file=sys.stderr)
        return 2
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
