"""Workloads: prompts, output lengths and depths, the same for every system that a benchmark compares."""

import argparse
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
from transformers import PreTrainedTokenizerBase

from .conversations import LAYOUTS, read_conversations
from .json_file import read_json
from .lengths import draw_lengths, read_lengths
from .mixes import MIXES, check_mix, default_mix, depth_shares, draw_depths
from .report import check_seed
from .unused import refuse_unused

__all__ = [
    "LIVE",
    "Workload",
    "add_workload_arguments",
    "check_count",
    "check_workload",
    "make_workload",
    "resolve_workload",
]

LIVE = "live"
_MOST = 10_000_000  # requests; with what is kept of each, more fill the memory of most machines
_ANY_IDS = 8192  # vocabulary of prompts that no model reads


@dataclass(frozen=True)
class Workload:
    """Requests in the order in which they come.

    Attributes:
        prompts: token ids of each.
        new_tokens: tokens that each is given, whatever they are: nothing ends a request earlier.
        depths: for each a depth per new token, the first of them full depth; None leaves it to the model's own rule.
    """

    prompts: list[list[int]]
    new_tokens: list[int]
    depths: list[list[int]] | None

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def tokens(self) -> int:
        """Generated tokens, all requests together."""
        return sum(self.new_tokens)

    def checksum(self) -> str:
        """SHA-256 of ids, lengths and depths: equal for equal workloads, on every machine."""
        return hashlib.sha256(json.dumps(asdict(self), separators=(",", ":")).encode()).hexdigest()

    def summary(self) -> dict[str, Any]:
        """What a report says about it."""
        prompts = [len(prompt) for prompt in self.prompts]
        summary = {"requests": len(self), "checksum": self.checksum()}
        for name, lengths in (("prompt", prompts), ("new_tokens", self.new_tokens)):
            summary[name] = {"mean": sum(lengths) / len(lengths), "least": min(lengths), "most": max(lengths)}
        if self.depths is not None:
            summary["mean_depth"] = sum(map(sum, self.depths)) / self.tokens
        return summary

    def save(self, path: Path, depths: Sequence[Sequence[int]], **about: Any) -> None:
        """Write the requests with the depths that a run gave them, for `load`; `about` says where they come from."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {**about, "prompts": self.prompts, "depths": [list(row) for row in depths]}
        path.write_text(json.dumps(content) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path, full_depth: int, vocab_size: int | None, kept: slice = slice(None)) -> "Workload":
        """The recorded requests.

        Args:
            full_depth: R of the model.
            vocab_size: of the model; None where none reads the ids.
            kept: which of them.

        Raises:
            FileNotFoundError: no such file.
            ValueError: it is no record, or one of a model with other loops or another vocabulary.
        """
        prompts, depths = (part[kept] for part in _read_record(path))
        if any(row[0] != full_depth or min(row) < 1 or max(row) > full_depth for row in depths):
            raise ValueError(
                f"trace={str(path)!r} was recorded on a model that does not have this one's {full_depth} loops: the "
                "first depth of a request is full depth, and no other is deeper. Choose the model it was recorded on."
            )
        ids = [token for prompt in prompts for token in prompt]
        if vocab_size is not None and ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise ValueError(f"trace={str(path)!r} holds token ids beyond the model's vocabulary of {vocab_size}.")
        return cls(prompts, [len(row) for row in depths], depths)


def add_workload_arguments(parser: argparse.ArgumentParser, prompt: str = "16-64", new: str = "64") -> None:
    """Arguments that `make_workload` reads. `--seed` is among those of `report.add_run_arguments`."""
    spec = "N, N-M (uniform) or lognormal:MEDIAN:SIGMA:MOST"
    parser.add_argument("--requests", type=int, help="requests at most (default 8 W)")
    parser.add_argument("--prompt", default=prompt, help=f"tokens of a prompt, {spec} (default %(default)s)")
    parser.add_argument("--new", default=new, help="new tokens of a request, the same forms (default %(default)s)")
    parser.add_argument("--lengths", type=Path, metavar="FILE", help="both from a JSON list of [input, output] instead")
    parser.add_argument("--data", type=Path, metavar="FILE", help="prompts and lengths of their answers from a file")
    parser.add_argument("--data-layout", choices=tuple(LAYOUTS), help="of --data (default: by its fields)")
    parser.add_argument("--longest", type=int, default=1024, help="prompts and answers of --data are cut to this")
    parser.add_argument(
        "--mix",
        help=f"depths: {', '.join(MIXES)}:MEAN, shares such as 1:.4,2:.6, or {LIVE} for the model's own exit rule "
        "(default shallow-heavy; poisson-lognormal:6 for models of more than 8 loops)",
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="replay requests and depths that --record wrote")
    parser.set_defaults(default_of=parser.get_default)  # tells what was given, see `refuse_unused`


def check_count(name: str, count: float) -> None:
    """Refuse a number of requests that nobody has the memory for.

    Raises:
        ValueError: less than one, or more than ten millions.
    """
    if not 1 <= count <= _MOST:
        raise ValueError(f"{name}={count:.12g}: choose at least 1 and at most {_MOST}.")


def check_workload(arguments: argparse.Namespace) -> None:
    """Refuse what no model could serve, before one is made.

    Args:
        arguments: of `add_workload_arguments`, and `seed`.

    Raises:
        ValueError: arguments that contradict each other or name nothing.
        FileNotFoundError: a file that is not there.
    """
    check_seed(arguments.seed)
    if arguments.requests is not None:
        check_count("requests", arguments.requests)
    if arguments.longest < 1:
        raise ValueError(f"longest={arguments.longest}: choose at least 1.")
    sources = [name for name in ("lengths", "data", "trace") if getattr(arguments, name) is not None]
    if len(sources) > 1:
        raise ValueError(f"--{sources[0]} and --{sources[1]} both say what the requests are. Give one of them.")
    if arguments.mix is not None:
        if arguments.trace is not None:
            raise ValueError(f"mix={arguments.mix!r} beside --trace, which holds the depths. Leave one of them out.")
        if arguments.mix != LIVE:
            check_mix(arguments.mix)
    if sources:
        refuse_unused(arguments, ("prompt", "new"), f"beside --{sources[0]}, which holds the lengths. Leave one out")
    if arguments.data is None:
        refuse_unused(arguments, ("data_layout", "longest"), "without --data. Leave it out")
    if arguments.trace is not None:
        _read_record(arguments.trace)
    elif arguments.lengths is not None:
        read_lengths(arguments.lengths)
    elif arguments.data is not None:
        arguments.data.stat()  # read once only, for it may be large
    else:
        for spec in (arguments.prompt, arguments.new):
            draw_lengths(spec, 0, numpy.random.default_rng())


def make_workload(
    arguments: argparse.Namespace,
    requests: int,
    full_depth: int,
    vocab_size: int | None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    skip: int = 0,
) -> Workload:
    """The workload that the command line asks for; the same for the same arguments.

    Args:
        arguments: of `add_workload_arguments`, and `seed`.
        requests: where `--requests` is not given.
        full_depth: R.
        vocab_size: of the model; None where none reads the ids.
        tokenizer: for `--data`.
        skip: requests of a file that are left out before the first; what is drawn has no order to skip in.

    Returns:
        The workload; fewer requests, or none, where a file ends.

    Raises:
        ValueError: arguments that contradict each other or name nothing.
        FileNotFoundError: a file that is not there.
    """
    check_workload(arguments)
    requests = requests if arguments.requests is None else arguments.requests
    kept = slice(skip, skip + requests)
    if arguments.trace is not None:
        return Workload.load(arguments.trace, full_depth, vocab_size, kept)
    # A stream of random numbers for each, so that other depths leave the prompts as they are.
    prompt_rng, new_rng, id_rng, depth_rng = (numpy.random.default_rng([arguments.seed, part]) for part in range(4))
    if arguments.data is not None:
        prompts, new_tokens = _from_texts(arguments, kept, vocab_size, tokenizer)
    else:
        if arguments.lengths is not None:
            inputs, new_tokens = (lengths[kept] for lengths in read_lengths(arguments.lengths))
        else:
            inputs = draw_lengths(arguments.prompt, requests, prompt_rng)
            new_tokens = draw_lengths(arguments.new, requests, new_rng)
        prompts = [id_rng.integers(1, vocab_size or _ANY_IDS, size=length).tolist() for length in inputs]
    mix = arguments.mix or default_mix(full_depth)
    depths = None if mix == LIVE else draw_depths(depth_shares(mix, full_depth), new_tokens, full_depth, depth_rng)
    return Workload(prompts, new_tokens, depths)


def resolve_workload(arguments: argparse.Namespace, workload: Workload, full_depth: int) -> dict[str, Any]:
    """The arguments of the workload as they were in the end, for a report; None are those that it made no use of."""
    files = [arguments.lengths, arguments.data, arguments.trace]
    unused = [] if files == [None] * 3 else ["prompt", "new"]
    unused += [] if arguments.data is not None else ["longest"]
    mix = None if arguments.trace is not None else arguments.mix or default_mix(full_depth)
    return {"requests": len(workload), "mix": mix, **dict.fromkeys(unused)}


def _read_record(path: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and depths of a file that `Workload.save` wrote; whether they fit a model is left open."""
    content = read_json(path, "trace")
    try:
        prompts, depths = content["prompts"], content["depths"]
        good = 0 < len(prompts) == len(depths) and all(map(_is_row, (*prompts, *depths)))
    except (TypeError, KeyError):
        good = False
    if not good:
        raise ValueError(
            f"trace={str(path)!r} is no record of depths: it needs `prompts` and `depths`, lists of a list of integers "
            "for each request, as --record writes them."
        )
    return prompts, depths


def _is_row(row: Any) -> bool:
    return isinstance(row, list) and len(row) > 0 and all(type(value) is int for value in row)


def _from_texts(
    arguments: argparse.Namespace, kept: slice, vocab_size: int | None, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[list[list[int]], list[int]]:
    """Ids of the prompts and lengths of the answers."""
    if tokenizer is None:
        raise ValueError("--data needs a tokenizer, and this benchmark has none. Give lengths by --lengths instead.")
    pairs = read_conversations(arguments.data, arguments.data_layout)[kept]
    prompts = [tokenizer(prompt).input_ids[: arguments.longest] for prompt, _ in pairs]
    if vocab_size is not None and max((max(prompt) for prompt in prompts), default=0) >= vocab_size:
        raise ValueError(f"data={str(arguments.data)!r}: the tokenizer's ids exceed the vocabulary of {vocab_size}.")
    answers = [len(tokenizer(answer, add_special_tokens=False).input_ids) for _, answer in pairs]
    return prompts, [max(1, min(length, arguments.longest)) for length in answers]
