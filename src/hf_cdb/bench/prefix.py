"""Prompts that begin alike: the time of a batch that computes what they share once, against one that does not."""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..generation_output import GenerateCDBOutput
from ..prefixes import LEAST
from .models import add_model_arguments, check_device, load_model
from .report import Report, add_run_arguments, check_outputs, check_seed, markdown_table, set_threads
from .workloads import check_count

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, default="tiny-ouro")
    parser.set_defaults(run=run)
    shared = [LEAST, 2 * LEAST, 250, 1000]
    parser.add_argument("--shared", type=int, nargs="+", default=shared, help="positions (default %(default)s)")
    parser.add_argument("--prompts", type=int, nargs="+", default=[2, 64], help="how many (default %(default)s)")
    parser.add_argument("--own", type=int, default=12, help="positions of a prompt after these (default %(default)s)")
    parser.add_argument("--new", type=int, default=8, help="new tokens (default %(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="runs of both, in turn (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write settings and all figures to this file")
    add_run_arguments(parser)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark, print a table, and return the content of the JSON.

    Raises:
        ValueError: arguments out of their range.
        RuntimeError: the runs gave different tokens or depths.
    """
    for name in ("own", "new", "turns"):
        check_count(name, getattr(arguments, name))
    for name in ("shared", "prompts"):
        for value in getattr(arguments, name):
            check_count(name, value)
    check_seed(arguments.seed)
    check_device(arguments.device)
    check_outputs(json=arguments.json)
    set_threads(arguments.threads)
    model = load_model(arguments.model, arguments.dtype, arguments.device)
    rows = [_measure(model, arguments, *case) for case in _cases(arguments)]
    columns = {"prompts": "d", "shared": "d", "positions off": "d", "positions on": "d"}
    columns |= {"seconds off": ".2f", "seconds on": ".2f", "off / on": ".2f"}
    print(f"{arguments.own} positions of its own in each prompt, {arguments.new} new tokens, all prompts in flight.\n")
    print(markdown_table(columns, rows))
    print(
        "\npositions: of prompts, that ran; seconds: of the processor, medians; off / on: the median of the turns' "
        "ratios. Tokens and depths are equal."
    )
    report = Report(arguments, model, {}, {"exit_rule": "never"})
    report.add("prefix_reuse", rows)
    report.write(arguments.json)
    return report.content


def _cases(arguments: argparse.Namespace) -> list[tuple[int, int]]:
    return [(prompts, shared) for prompts in arguments.prompts for shared in arguments.shared]


def _measure(model: PreTrainedModel, arguments: argparse.Namespace, prompts: int, shared: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(arguments.seed)
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = torch.randint(1, vocabulary, (prompts, shared + arguments.own), generator=generator)
    ids[:, :shared] = ids[0, :shared]
    ids[:, shared] = 1 + torch.arange(prompts) % (vocabulary - 1)  # there they part
    ids = ids.to(model.device)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    outputs: dict[bool, GenerateCDBOutput] = {}
    for _ in range(arguments.turns):
        for reuse in seconds:
            began = time.process_time()
            outputs[reuse] = model.generate(
                ids,
                max_new_tokens=arguments.new,
                do_sample=False,
                return_dict_in_generate=True,
                cdb={"exit_rule": "never", "max_num_seqs": prompts, "prefix_reuse": reuse},
            )
            seconds[reuse].append(time.process_time() - began)
    off, on = outputs[False], outputs[True]
    if not torch.equal(off.sequences, on.sequences) or not torch.equal(off.exit_depths, on.exit_depths):
        raise RuntimeError(
            f"{prompts} prompts that share {shared} positions: tokens or depths differ. In float32 two logits of a "
            "random model may be nearer than rounding; try --dtype float64."
        )
    return {
        "prompts": prompts,
        "shared": shared,
        "positions off": off.stats.prompt_positions,
        "positions on": on.stats.prompt_positions,
        "seconds off": statistics.median(seconds[False]),
        "seconds on": statistics.median(seconds[True]),
        "off / on": statistics.median(one / other for one, other in zip(seconds[False], seconds[True], strict=True)),
    }
