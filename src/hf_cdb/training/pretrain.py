"""Training of a small looped model from a recipe, on one process or several."""

import json
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch import nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from .batches import PackedBatches
from .evaluation import evaluate, table
from .objectives import build_objective
from .optimizers import build_optimizers, learning_rate_factor, set_learning_rates
from .recipe import Recipe, build_config
from .recipe_file import write_recipe
from .run_state import resume as resume_run
from .run_state import save_checkpoint
from .tokenizer import train_tokenizer

__all__ = ["CHECKPOINTS", "LOG", "MODEL", "train"]

# Where things lie in the output folder.
CHECKPOINTS, LOG, MODEL = "checkpoints", "log.jsonl", "model"


def train(recipe: Recipe, output: str | Path, *, resume: bool = False) -> dict[str, Any]:
    """Train the model of a recipe and save it.

    The output folder gets `log.jsonl` (a line of losses every `log_every` steps, and every evaluation), `checkpoints/`
    and, at the end, `model/`: weights, config, generation config and tokenizer for `from_pretrained`, the recipe and
    `metrics.json`. Weights depend on the recipe alone, up to rounding in another number of threads or processes.

    Args:
        recipe: what to do.
        output: folder; made where it is missing.
        resume: go on from the newest checkpoint in it.

    Returns:
        The metrics of the saved model, as in `metrics.json`.

    Raises:
        ValueError: settings that do not fit each other, or a checkpoint of another recipe.
        FileNotFoundError: resume without a checkpoint.
        FileExistsError: the folder holds a run already, and resume is off.
        OSError: the folder cannot be written.
        FloatingPointError: the loss is no finite number any more.
    """
    output = Path(output)
    accelerator = Accelerator(mixed_precision=recipe.mixed_precision)
    prepare_output(output, recipe, resume, accelerator)
    run = _Run(recipe, output, accelerator)
    if resume:
        run.resume()
    run.train()
    return run.finish()


def prepare_output(output: Path, recipe: Recipe, resume: bool, accelerator: Accelerator) -> None:
    """Make the output folder and write the recipe into it, or refuse it."""
    if not resume and accelerator.is_main_process:
        if (output / LOG).exists():
            raise FileExistsError(
                f"output={str(output)!r} holds a run already. Resume it (resume, --resume), or choose another folder."
            )
        try:
            output.mkdir(parents=True, exist_ok=True)
            (output / CHECKPOINTS).mkdir(exist_ok=True)
            write_recipe(recipe, output)
        except OSError as error:
            raise type(error)(
                f"output={str(output)!r} cannot be written: {error.strerror}. Choose a folder of yours."
            ) from error
    accelerator.wait_for_everyone()


class _Run:
    """A run in progress: what `train` builds, steps through and saves."""

    def __init__(self, recipe: Recipe, output: Path, accelerator: Accelerator):
        self.recipe, self.output, self.accelerator = recipe, output, accelerator
        self.step = 0
        set_seed(recipe.seed)
        self.tokenizer = train_tokenizer(recipe.data.vocab_size)
        config = build_config(recipe, self.tokenizer)
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation=recipe.attention).train()
        if recipe.embedding_std is not None:
            nn.init.normal_(self.model.get_input_embeddings().weight, std=recipe.embedding_std)
        objective = build_objective(self.model, recipe.objective, recipe.seed, recipe.compile)
        optimizers = build_optimizers(self.model, recipe.optimizer)
        self.objective, *self.optimizers = accelerator.prepare(objective, *optimizers)
        data = recipe.data
        self.batches = PackedBatches(
            self.tokenizer,
            length=data.length,
            text_rows=data.text_rows,
            task_rows=data.task_rows,
            seed=recipe.seed,
            prompt_weight=data.prompt_weight,
            task_shares=data.task_shares,
        )
        rows = data.text_rows + data.task_rows
        if rows < accelerator.num_processes:
            raise ValueError(f"data: {rows} rows are fewer than {accelerator.num_processes} processes. Add rows.")
        self.tokens_per_step = rows * data.length

    def resume(self) -> None:
        self.step = resume_run(self.accelerator, self.output / CHECKPOINTS, self.recipe)
        if self.accelerator.is_main_process:
            # What was logged after the checkpoint happens again.
            log = self.output / LOG
            lines = log.read_text(encoding="utf-8").splitlines(keepends=True) if log.exists() else []
            log.write_text("".join(line for line in lines if json.loads(line)["step"] <= self.step), encoding="utf-8")

    def train(self) -> None:
        recipe, main = self.recipe, self.accelerator.is_main_process
        total, count, begin = 0.0, 0, time.perf_counter()
        saved = begin
        progress = tqdm(total=recipe.steps, initial=self.step, disable=not main, unit="step", smoothing=0.05)
        with progress:
            while self.step < recipe.steps:
                losses, norm, factor = self.advance()
                total, count = total + losses, count + 1
                progress.update()
                if self.step % recipe.log_every == 0 or self.step == recipe.steps:
                    entry = self.log_entry(total / count, norm, factor, count / (time.perf_counter() - begin))
                    progress.set_postfix(loss=f"{entry['losses'][-1]:.3f}")
                    self.log(entry)
                    total, count, begin = 0.0, 0, time.perf_counter()
                every = recipe.evaluation.every
                if every and self.step % every == 0 and self.step < recipe.steps:
                    pause = time.perf_counter()
                    self.log_evaluation(progress)
                    begin += time.perf_counter() - pause
                if self.checkpoint_is_due(time.perf_counter() - saved):
                    pause = time.perf_counter()
                    self.save()
                    saved = time.perf_counter()
                    begin += saved - pause

    def advance(self) -> tuple[torch.Tensor, torch.Tensor, float]:
        """One step: losses of all processes, norm of the gradient, factor of the learning rates."""
        accelerator, recipe = self.accelerator, self.recipe
        batch = self.batches.batch(self.step)
        weight = float(batch["weights"].sum())
        mine = slice(accelerator.process_index, None, accelerator.num_processes)
        batch = {name: values[mine].to(accelerator.device) for name, values in batch.items()}
        loss, losses = self.objective(batch, weight, self.step)
        # Gradients are averaged over the processes, while each holds a share of one sum.
        accelerator.backward(loss * accelerator.num_processes)
        norm = accelerator.clip_grad_norm_(self.model.parameters(), recipe.optimizer.clip_norm)
        factor = learning_rate_factor(self.step, recipe.steps, recipe.optimizer)
        set_learning_rates(self.optimizers, factor)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return accelerator.reduce(losses), norm, factor

    def log_entry(
        self, losses: torch.Tensor, norm: torch.Tensor, factor: float, steps_per_second: float
    ) -> dict[str, Any]:
        losses = losses.tolist()
        if not all(map(math.isfinite, losses)):
            raise FloatingPointError(
                f"losses={losses} before step {self.step}: training has diverged. Lower muon_lr and adamw_lr, or "
                "lengthen warmup_steps, and start anew."
            )
        recipe = self.recipe.optimizer
        return {
            "step": self.step,
            "losses": [round(loss, 5) for loss in losses],
            "muon_lr": recipe.muon_lr * factor,
            "adamw_lr": recipe.adamw_lr * factor,
            "gradient_norm": round(float(norm), 5),
            "tokens_per_second": round(self.tokens_per_step * steps_per_second, 1),
        }

    def log(self, entry: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            with (self.output / LOG).open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")

    def log_evaluation(self, progress: tqdm) -> None:
        if self.accelerator.is_main_process:
            settings = self.recipe.evaluation
            found = evaluate(
                self.model,
                self.tokenizer,
                chapters=settings.chapters,
                count=settings.examples,
                length=self.recipe.data.length,
            )
            self.log({"step": self.step, "evaluation": found})
            progress.write(f"step {self.step}\n{table(found)}")
        self.accelerator.wait_for_everyone()

    def checkpoint_is_due(self, seconds: float) -> bool:
        settings = self.recipe.checkpoint
        if self.step == self.recipe.steps or (settings.every_steps and self.step % settings.every_steps == 0):
            return True
        if settings.every_minutes is None:
            return False
        due = [seconds >= 60 * settings.every_minutes]
        if self.accelerator.num_processes > 1:
            broadcast_object_list(due)  # their clocks differ, and all have to save together
        return due[0]

    def save(self) -> None:
        save_checkpoint(
            self.accelerator, self.output / CHECKPOINTS, self.step, self.recipe, self.recipe.checkpoint.keep
        )

    def finish(self) -> dict[str, Any]:
        """Save the model for `from_pretrained`, load it as a user would, and measure that."""
        metrics: list[Any] = [None]
        if self.accelerator.is_main_process:
            metrics = [self._export()]
        if self.accelerator.num_processes > 1:
            broadcast_object_list(metrics)
        return metrics[0]

    def _export(self) -> dict[str, Any]:
        partial, final = self.output / f"partial-{MODEL}", self.output / MODEL
        shutil.rmtree(partial, ignore_errors=True)
        if self.recipe.cdb is not None:
            self.model.generation_config.cdb_config = self.recipe.cdb
        self.model.to(getattr(torch, self.recipe.save_dtype)).eval().save_pretrained(partial)
        self.tokenizer.save_pretrained(partial)
        write_recipe(self.recipe, partial)
        model = AutoModelForCausalLM.from_pretrained(partial, dtype=torch.float32)
        settings = self.recipe.evaluation
        found = evaluate(
            model,
            self.tokenizer,
            chapters=settings.final_chapters,
            count=settings.final_examples,
            length=self.recipe.data.length,
        )
        self.log({"step": self.step, "evaluation": found})
        metrics = {
            "parameters": model.num_parameters(),
            "steps": self.step,
            "tokens": self.step * self.tokens_per_step,
            **found,
        }
        (partial / "metrics.json").write_text(json.dumps(metrics, indent=1), encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        return metrics
