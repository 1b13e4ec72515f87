"""Checkpoints of a training run: whole or absent, never half written."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from .recipe import Recipe
from .recipe_file import recipe_from_dict

__all__ = ["latest_checkpoint", "resume", "save_checkpoint"]

_PREFIX = "step-"
_RUN = "run.json"


def save_checkpoint(accelerator: Accelerator, folder: Path, step: int, recipe: Recipe, keep: int) -> Path:
    """Save weights, optimizers and generators of all processes, the recipe and the number of steps done.

    Written under another name and renamed when complete; older checkpoints beyond `keep` are removed after that.

    Args:
        accelerator: holds model and optimizers.
        folder: of all checkpoints of the run.
        step: steps done.
        recipe: of the run.
        keep: newest checkpoints to keep.

    Returns:
        The checkpoint, `folder/step-<step>`.
    """
    final = folder / f"{_PREFIX}{step:08d}"
    partial = folder / f"partial-{step:08d}"
    if accelerator.is_main_process and partial.exists():
        shutil.rmtree(partial)  # left by a killed run
    accelerator.wait_for_everyone()
    accelerator.save_state(str(partial))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        run = {"step": step, "recipe": recipe.to_dict(), "processes": accelerator.num_processes}
        (partial / _RUN).write_text(json.dumps(run, indent=1), encoding="utf-8")
        if final.exists():
            shutil.rmtree(final)
        os.replace(partial, final)
        for old in _checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()
    return final


def latest_checkpoint(folder: Path) -> Path:
    """The checkpoint with the most steps.

    Raises:
        FileNotFoundError: there is none.
    """
    found = _checkpoints(folder)
    if not found:
        raise FileNotFoundError(
            f"resume: {str(folder)!r} holds no checkpoint. Start without resume, or name the output folder of the run."
        )
    return found[-1]


def resume(accelerator: Accelerator, folder: Path, recipe: Recipe) -> int:
    """Load the newest checkpoint into what `accelerator` holds, and return the number of steps done.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: it belongs to a run with another recipe or another number of processes.
    """
    checkpoint = latest_checkpoint(folder)
    run: dict[str, Any] = json.loads((checkpoint / _RUN).read_text(encoding="utf-8"))
    saved = recipe_from_dict(run["recipe"])
    if names := saved.differences(recipe):
        raise ValueError(
            f"resume: the run in {str(folder.parent)!r} has another recipe; {', '.join(names)} differ. Resume with its "
            "own recipe (recipe.yaml there), or start anew in another folder."
        )
    if run["processes"] != accelerator.num_processes:
        raise ValueError(
            f"resume: the run in {str(folder.parent)!r} has {run['processes']} processes, this one "
            f"{accelerator.num_processes}: their sums would round otherwise. Start as many."
        )
    accelerator.load_state(str(checkpoint))
    return run["step"]


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if (path / _RUN).is_file())
