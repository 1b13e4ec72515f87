"""`hf-cdb train gate MODEL`: train an exit head and save it beside the model."""

import argparse
import os
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from ..adapters import LoopAdapter, adapter_for
from ..checkpoints import EMBEDDED, model_path, saved_tokenizer
from ..exit_heads import FOLDER, KINDS, find_exit_head
from .gate import GateSettings, train_gate
from .gate_data import GateData, read_gate_data
from .gate_targets import TARGETS, make_target

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command; `run` of the parsed arguments carries it out."""
    defaults = GateSettings()
    parser.add_argument("model", metavar="MODEL", help=f"{', '.join(EMBEDDED)}, a folder or a Hub id")
    parser.add_argument("--kind", choices=list(KINDS), default=defaults.kind, help="(default %(default)s)")
    parser.add_argument("--target", choices=list(TARGETS), default="kl", help="(default %(default)s)")
    parser.add_argument("--slope", type=float, help="of the targets kl and improvement (default the target's)")
    parser.add_argument("--scale", type=float, help="of the target kl, in nats (default the target's)")
    parser.add_argument("--margin", type=float, help="of the target improvement, in nats (default the target's)")
    parser.add_argument(
        "--data",
        default="builtin",
        help="a .txt or .jsonl file, a `datasets` folder, or builtin: the package's text and tasks (default)",
    )
    parser.add_argument("--tokens", type=int, default=32_768, help="to train on (default %(default)s)")
    parser.add_argument("--held-out-tokens", type=int, default=16_384, help="to report on (default %(default)s)")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row at most (default %(default)s)")
    parser.add_argument(
        "--prompt-weight", type=float, default=0.1, help="of prompts, where text has 1 (default %(default)s)"
    )
    parser.add_argument("--answer-weight", type=float, default=1.0, help="of answers (default %(default)s)")
    parser.add_argument("--steps", type=int, default=defaults.steps, help="(default %(default)s)")
    parser.add_argument("--batch", type=int, default=defaults.batch, help="states in a step (default %(default)s)")
    parser.add_argument("--lr", type=float, default=defaults.lr, help="learning rate (default %(default)s)")
    parser.add_argument(
        "--depth-bias",
        action=argparse.BooleanOptionalAction,
        default=defaults.depth_bias,
        help="a bias for every loop (default on)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--max-memory",
        type=int,
        default=defaults.max_memory,
        help="bytes of states in memory; more go to a temporary file (default %(default)s)",
    )
    parser.add_argument("--output", help="folder to write exit_heads into (default MODEL, if it is a folder)")
    parser.add_argument(
        "--into-model",
        action="store_true",
        help="write the head into the model's own gate and save the model again, in place of a file beside it; for "
        "models that have a gate, with --kind same-step and --no-depth-bias",
    )
    parser.add_argument("--thresholds", type=float, nargs="+", default=list(defaults.thresholds), help="of the report")
    parser.add_argument("--device", help="device of torch (default cuda where there is one, else cpu)")
    parser.add_argument("--threads", type=int, help="threads of torch on the CPU (default torch's)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Train, print the report, save.

    Raises:
        ValueError: an argument that cannot work; before any training where possible.
    """
    if arguments.output is None and not os.path.isdir(arguments.model):
        raise ValueError(f"MODEL={arguments.model!r} is no folder that a head could be saved in. Name one by --output.")
    for name in ("threads", "tokens", "held_out_tokens"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}: choose at least 1.")
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    device = _usable_device(arguments.device)
    output = _prepare_output(arguments)
    target = make_target(arguments.target, slope=arguments.slope, scale=arguments.scale, margin=arguments.margin)
    settings = GateSettings(
        kind=arguments.kind,
        target=target,
        steps=arguments.steps,
        lr=arguments.lr,
        batch=arguments.batch,
        depth_bias=arguments.depth_bias,
        seed=arguments.seed,
        thresholds=tuple(arguments.thresholds),
        max_memory=arguments.max_memory,
    )
    path = model_path(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
    adapter = adapter_for(model)  # refuses a model without loops before the data is read
    if arguments.into_model:
        _check_into_model(arguments, adapter)
    tokenizer = saved_tokenizer(path)  # None where the data has to bring token ids
    data = read_gate_data(
        arguments.data,
        tokenizer,
        tokens=arguments.tokens,
        held_out_tokens=arguments.held_out_tokens,
        length=arguments.length,
        prompt_weight=arguments.prompt_weight,
        answer_weight=arguments.answer_weight,
        seed=arguments.seed,
    )
    _check_ids(data, adapter.vocab_size)
    # Half precision is slow on a CPU, and rounds what the targets compare.
    saved_dtype, dtype = model.dtype, torch.float32 if torch.device(device).type == "cpu" else model.dtype
    result = train_gate(model.to(device, dtype), data, settings)
    if arguments.into_model:
        adapter.set_gate(result.head.weight[0].to(device), result.head.bias[0].to(device))
        model.to(saved_dtype).save_pretrained(output)
        if tokenizer is not None and output.resolve() != Path(arguments.model).resolve():
            tokenizer.save_pretrained(output)
        paths = [*result.save_report(output, "own-gate"), output]
    else:
        paths = result.save(output)
    print(result.report.to_markdown())
    print("Saved", ", ".join(map(str, paths)))
    if arguments.into_model:
        if find_exit_head(model, "same-step") is not None:
            print("With cdb the same-step head beside the model comes before its own gate: remove it to use the gate.")
        return
    if output.resolve() != Path(arguments.model).resolve():
        print(
            "Not beside the model: use hf_cdb.attach_exit_head(model, hf_cdb.load_exit_head(path)), or copy the folder."
        )


def _usable_device(name: str | None) -> str:
    """The device to train on, found out to hold and give back numbers before any work."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch raises each of them, by the device
        raise ValueError(
            f"device={name!r} cannot be used: {str(error).splitlines()[0]} Choose cpu, or a device that torch has here."
        ) from error
    return name


def _prepare_output(arguments: argparse.Namespace) -> Path:
    """The folder to save into, found out to be writable before any work."""
    output = Path(arguments.output or arguments.model)
    try:
        (output / FOLDER).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output / FOLDER):
            pass
    except OSError as error:
        raise type(error)(
            f"output={str(output)!r} cannot be written: {error.strerror}. Choose a folder of yours by --output."
        ) from error
    return output


def _check_ids(data: GateData, vocab_size: int) -> None:
    """Refuse token ids that the model does not have."""
    for row in (*data.train, *data.held_out):
        for token in row.ids:
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"data: input_ids holds {token}, but the model's vocabulary has {vocab_size} tokens. Give ids made "
                    "by the model's own tokenizer."
                )


def _check_into_model(arguments: argparse.Namespace, adapter: LoopAdapter) -> None:
    name = type(adapter.model).__name__
    if not adapter.has_gate:
        raise ValueError(f"--into-model: {name} has no gate of its own. Leave it out: the head is saved beside it.")
    if arguments.kind != "same-step" or arguments.depth_bias:
        biases = "a bias for every loop" if arguments.depth_bias else "one bias"
        raise ValueError(
            f"--into-model with --kind {arguments.kind} and {biases}: the gate of {name} says after every loop, with "
            "one bias, whether to leave there. Add --kind same-step --no-depth-bias."
        )
