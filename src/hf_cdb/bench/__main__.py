"""`python -m hf_cdb.bench quick`."""

import argparse

from . import quick


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hf_cdb.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    quick.add_arguments(commands.add_parser("quick", help=quick.__doc__.splitlines()[0]))
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
