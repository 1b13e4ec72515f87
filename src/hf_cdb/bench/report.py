"""What every benchmark shares: where it ran, what it prints, the JSON and the picture that it leaves."""

import argparse
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy
import psutil
import torch

from ..adapters import adapter_for

__all__ = [
    "Report",
    "add_output_arguments",
    "add_run_arguments",
    "check_outputs",
    "check_plot",
    "check_seed",
    "environment",
    "markdown_table",
    "model_sizes",
    "rate_text",
    "save_plot",
    "set_threads",
]

# Not settings of the benchmark: what the command line needs, and where the results go.
_NOT_SETTINGS = ("run", "group", "command", "traceback", "json", "plot", "default_of")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """`--threads` and `--seed`."""
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the workload (default %(default)s)")


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """`--json` and `--plot`."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write settings and all figures to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the figures into this PNG")


def set_threads(threads: int) -> None:
    """Compute with so many torch threads.

    Raises:
        ValueError: less than one.
    """
    if threads < 1:
        raise ValueError(f"threads={threads}: choose at least 1.")
    torch.set_num_threads(threads)


def check_seed(seed: int) -> None:
    """Refuse what seeds no generator of numbers.

    Raises:
        ValueError: a negative seed, or one of more than 63 bits.
    """
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed}: choose at least 0 and less than 2**63.")


def environment() -> dict[str, Any]:
    """Versions, processor, accelerator and threads, for whoever reads the figures later."""
    names = ("hf-cdb", "torch", "transformers", "numpy")
    cuda = torch.cuda.is_available()
    return {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in names}},
        "system": platform.system(),
        "processor": _processor(),
        "cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "memory_bytes": psutil.virtual_memory().total,
        "accelerator": torch.cuda.get_device_name() if cuda else None,
        "torch_threads": torch.get_num_threads(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
    }


def _processor() -> str:
    """The processor's name; where the system has no file that tells it, its architecture."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def model_sizes(model: torch.nn.Module) -> dict[str, Any]:
    """Sizes of a looped model: parameters by how often they run, loops, layers, dtype and device."""
    adapter = adapter_for(model)
    once, per_loop = adapter.parameter_counts()
    return {
        "class": type(adapter.model).__name__,
        "parameters": sum(parameter.numel() for parameter in adapter.model.parameters()),
        "parameters_once": once,
        "parameters_per_loop": per_loop,
        "once_over_per_loop": once / per_loop,
        "loops": adapter.full_depth,
        "layers": [adapter.prelude_layers, adapter.core_layers, adapter.coda_layers],
        "kv_heads": adapter.kv_heads,
        "head_dim": adapter.head_dim,
        "vocab_size": adapter.vocab_size,
        "dtype": str(adapter.dtype).removeprefix("torch."),
        "device": str(adapter.device),
        "attention": adapter.model.config._attn_implementation,
    }


def markdown_table(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table.

    Args:
        columns: heading -> format specification of its numbers, such as ".2f"; "" prints values as they are.
        rows: heading -> value; None and what is missing are left blank, and values that are text are not formatted.
    """
    body = [" | ".join(_cell(row.get(name), form) for name, form in columns.items()) for row in rows]
    return "\n".join([f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *(f"| {line} |" for line in body)])


def _cell(value: Any, form: str) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else format(value, form)


def rate_text(rate: float | None) -> str | None:
    """Tokens per second for a table: whole ones, or of a slow model three digits."""
    return None if rate is None else f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


class Report:
    """The figures of one run of a benchmark.

    Args:
        arguments: of the command line; what they resolved to goes into the JSON.
        model: its sizes go there too; None where no model ran.
        workload: checksum, number of requests and the like.
        resolved: settings that the command line left to defaults, as they were in the end.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        model: torch.nn.Module | None = None,
        workload: Mapping[str, Any] | None = None,
        resolved: Mapping[str, Any] | None = None,
    ):
        given = {name: value for name, value in vars(arguments).items() if name not in _NOT_SETTINGS}
        command = " ".join(["hf-cdb", *(getattr(arguments, name, "") for name in ("group", "command"))]).strip()
        self.content: dict[str, Any] = {
            "command": command,
            "settings": {**given, **(resolved or {})},
            "environment": environment(),
            "model": None if model is None else model_sizes(model),
            "workload": dict(workload or {}),
        }

    def add(self, name: str, figures: Any) -> None:
        """Put figures into the JSON under this name."""
        self.content[name] = figures

    def write(self, path: Path | None) -> None:
        """Write the JSON; nothing without a path. Folders on the way are made."""
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.content, indent=1, default=_plain) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    """What JSON cannot hold as it is."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, numpy.generic | numpy.ndarray):
        return value.tolist()
    if isinstance(value, Path | torch.dtype | torch.device):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


def save_plot(path: Path | None, draw: Callable[[Any, Any], None], panels: int = 1, dpi: int = 120) -> None:
    """Draw into a PNG; nothing without a path.

    Args:
        draw: called with matplotlib's figure and its axes, one or an array of `panels` side by side.
        dpi: dots per inch; a panel is 6.4 inches wide.

    Raises:
        ValueError: matplotlib is not installed, or the file would be no PNG.
    """
    if path is None:
        return
    figure, axes = _subplots(path, panels)
    draw(figure, axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)


def check_outputs(**paths: Path | None) -> None:
    """Refuse files that could not be written in the end, before minutes of measuring.

    Args:
        paths: by argument the file that it names; a `plot` is also held to what `save_plot` asks.

    Raises:
        ValueError: a folder, a place that nothing can be written to, two arguments that name one file, or no picture.
    """
    named: dict[Path, str] = {}
    for name, path in paths.items():
        if path is None:
            continue
        _check_writable(name, path)
        other = named.setdefault(path.resolve(), name)
        if other != name:
            raise ValueError(f"{other} and {name} both name {str(path)!r}. Give each a file of its own.")
    check_plot(paths.get("plot"))


def _check_writable(name: str, path: Path) -> None:
    if path.is_dir():
        raise ValueError(f"{name}={str(path)!r} is a folder. Name a file, such as {str(path / name)!r}.")
    place = path
    while not place.exists() and place != place.parent:
        place = place.parent
    if place != path and not place.is_dir():
        raise ValueError(f"{name}={str(path)!r}: {str(place)!r} is a file, and no folder. Name another place.")
    if not os.access(place, os.W_OK):
        raise ValueError(f"{name}={str(path)!r}: nothing can be written to {str(place)!r}. Name another place.")


def check_plot(path: Path | None) -> None:
    """Raise what `save_plot` would, before minutes of measuring."""
    if path is not None:
        _check_writable("plot", path)
        _subplots(path, 1)


def _subplots(path: Path, panels: int) -> tuple[Any, Any]:
    if path.suffix.lower() != ".png":
        raise ValueError(f"plot={str(path)!r}: the picture is a PNG. Name a file that ends in .png.")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            f"plot={str(path)!r} needs matplotlib, which is not installed. Install it by `pip install "
            "'hf-cdb[bench]'`, or leave --plot out."
        ) from error
    # Without pyplot there is no window system to choose and no global list of figures to clean up.
    figure = Figure(figsize=(6.4 * panels, 4.4), layout="constrained")
    return figure, figure.subplots(1, panels)
