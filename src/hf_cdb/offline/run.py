"""From a file of prompts to a file of texts."""

import contextlib
import json
import os
import uuid
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..bench.report import environment
from ..evaluation.fingerprint import model_hashes
from ..evaluation.records import RecordFile
from ..evaluation.run import load_model_to_evaluate
from ..jobs import CDBGenerationOutput, Job, refusal
from ..manager import CDBManager
from ..request_arguments import shown
from .claims import Claims
from .prompts import Prompt, check_defaults, read_prompts, refuse_meaningless

__all__ = ["FileSettings", "generate_file"]

_WAITING = 8  # lines held beyond the rows in flight, so that a place that becomes free is taken at once
_LAUNCHER = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1}  # what launchers set, and the least that makes sense
# Where both are given, generate reads the second one alone.
_LENGTHS = {"max_length": "max_new_tokens", "min_length": "min_new_tokens"}
# Errors of which the next line would fare no better.
_FATAL = (torch.OutOfMemoryError, torch.AcceleratorError, MemoryError)
_POLL = 0.2  # seconds until it is looked again whether another process has died


@dataclass(frozen=True)
class FileSettings:
    """What decides, beside the prompts, what comes out.

    Attributes:
        model: "tiny-ouro", "tiny-huginn", a folder or a Hub id.
        revision: of the Hub.
        dtype: of weights and computation.
        device: of torch; of several processes on a machine each takes one of its kind.
        seed: a line that samples has the seed `seed` + its number, unless it says one itself.
        options: arguments of `CDBManager.add_request`, for lines that do not say otherwise; `max_length` of a line says
            so of `max_new_tokens` too.
        cdb: settings of cdb, over the saved ones of the model.
    """

    model: str = "tiny-ouro"
    revision: str | None = None
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    cdb: dict[str, Any] = field(default_factory=dict)


def generate_file(source: Path, output: Path, settings: FileSettings, progress: bool = True) -> int:
    """Continue every line of a file, or the rest of them where a run was stopped.

    Any number of processes may be called with the same arguments, by `torchrun` or one by one, on one machine or on
    several that share the folder of `output`. Each takes the next line that nobody is at when it has room for one, the
    longest first, and towards the end no more than its share of what is left. The lines of a process that dies go to
    the others. What a line gives depends on no other and on no number of processes.

    Args:
        source: JSON lines, see `Prompt`.
        output: JSON lines in the order of the prompts, which appear when all are done; until then, and for calls to
            come, `<output>.run` holds what they have to know. A line:

                {"line": from 1, "id", "text", "tokens": [ids], "exit_depths": [loops], "mean_depth": loops per token,
                 "prompt_tokens": count, "finish_reason": "stop", "length" or "error", "seed": null where nothing is
                 drawn, "error": null or why it failed}

    Returns:
        Lines that failed.

    Raises:
        ValueError: settings that no line could run with, or an output of other prompts or settings, or of a model that
            has changed since.
        OSError: no such file or model.
        RuntimeError: the model failed; lines under way are run again by the next call.
    """
    check_defaults(settings.options)
    prompts, digest = read_prompts(source)
    if output.exists() and output.samefile(source):
        raise ValueError(f"output={str(output)!r} is the input. Name another file.")
    folder = output.with_name(output.name + ".run")
    asked = {**asdict(settings), "input_sha256": digest, "versions": environment()["versions"]}
    _check(output, folder, asked)
    if not output.exists():
        # Of launchers only what they say, and no process group: those that are left would fail with one that dies.
        rank, local_rank, processes = (_said_by_launcher(*known) for known in _LAUNCHER.items())
        device = torch.device(settings.device)
        if device.type != "cpu" and device.index is None:
            device = torch.device(device.type, local_rank)
        model, tokenizer = load_model_to_evaluate(settings.model, settings.revision, settings.dtype, str(device))
        asked |= model_hashes(model, tokenizer)  # its folder may have changed since a run was stopped
        _check(output, folder, asked)
        worker = _Worker(model, tokenizer, settings, prompts, processes)
        _note(folder, asked)
        _check(output, folder, asked)  # another process may have been faster
        records = RecordFile(folder, uuid.uuid4().hex, key=lambda record: record["line"])
        with contextlib.closing(Claims(folder / "claims", len(prompts))) as claims:
            if not output.exists():  # others may have ended while the model was loaded
                with tqdm(
                    total=len(prompts), initial=claims.done, unit="line", disable=not progress or rank > 0
                ) as bar:
                    worker.work(claims, records, bar)
            with claims.alone():
                if not output.exists():
                    records.merge(prompt.line for prompt in prompts)
                    (folder / "records.jsonl").replace(output)
                # After the output is there: who opens another sees it.
                (folder / "claims").unlink(missing_ok=True)
    with output.open(encoding="utf-8") as lines:
        return sum(json.loads(line)["error"] is not None for line in lines)


def _said_by_launcher(name: str, least: int) -> int:
    """A number of the environment; the least where there is none.

    Raises:
        ValueError: it is none, or too small.
    """
    text = os.environ.get(name, str(least))
    if not text.isdecimal() or int(text) < least:
        raise ValueError(
            f"{name}={text!r} in the environment: launchers set an integer of at least {least} there. Correct it, or "
            "unset it."
        )
    return int(text)


def _note(folder: Path, asked: dict[str, Any]) -> None:
    """Say in the folder what it is for, unless another process has done so."""
    folder.mkdir(parents=True, exist_ok=True)
    own = folder / f"settings-{uuid.uuid4().hex}.new"
    own.write_text(json.dumps(asked, indent=1) + "\n", encoding="utf-8")
    with contextlib.suppress(FileExistsError):
        os.link(own, folder / "settings.json")  # whole, or not at all
    own.unlink()


def _check(output: Path, folder: Path, asked: dict[str, Any]) -> None:
    """Refuse to go on with something else.

    Raises:
        ValueError: the output, or what there is of it, is of other prompts or settings, or nobody knows of which.
    """
    path = folder / "settings.json"
    if not path.exists():
        if output.exists():
            raise ValueError(
                f"output={str(output)!r} exists, and no {folder.name} beside it tells how it was made. Name another "
                "file, or move this one away."
            )
        return
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(held, dict):
            raise ValueError("no JSON object")
    except ValueError as error:
        raise ValueError(
            f"output={str(output)!r}: {str(path)!r}, which tells how it was made, is damaged ({error}). Name another "
            f"file, or remove this one and {folder.name}."
        ) from error
    asked = json.loads(json.dumps(asked))
    if different := [name for name in asked if asked[name] != held.get(name)]:
        name = different[0]
        raise ValueError(
            f"output={str(output)!r} belongs to a run with another {', '.join(different)} ({name}: "
            f"{held.get(name)!r} there, {asked[name]!r} here). Name another file, or remove it and {folder.name}."
        )


class _Worker:
    """One process's part of a run.

    Args:
        model, tokenizer: as loaded for `settings`.
        settings: of the run.
        prompts: all lines of the input, at least one, in its order; those of other processes too.
        processes: that share the lines, as far as this one knows.

    Raises:
        ValueError: settings that no line could run with.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: FileSettings,
        prompts: list[Prompt],
        processes: int,
    ):
        self.tokenizer, self.settings, self.prompts, self.processes = tokenizer, settings, prompts, processes
        self.manager = CDBManager(model, cdb=settings.cdb or True)
        self._try_defaults(prompts[0].line)
        self._places = self.manager.config.max_num_seqs + _WAITING
        self._held: dict[str, tuple[int, Job, int | None]] = {}  # piece, job and seed, by the job's name
        # A long line that is begun last would keep its process alone at the end.
        self._candidates = deque(sorted(range(len(prompts)), key=self._size, reverse=True))

    def _try_defaults(self, line: int) -> None:
        """Prepare a request of the shortest prompt.

        Raises:
            ValueError: settings that no line could run with.
        """
        try:
            job = self.manager.make_job([0], **self._arguments({}, line))
        except (ValueError, *_FATAL):
            raise
        except Exception as error:  # of whatever kind, each line would have it
            raise ValueError(
                f"options={shown(self.settings.options)}: no line could run with them ({error!r}). Change or leave out "
                "what this names."
            ) from error
        config = job.run.generation_config  # holds what the model's own adds
        copies = None if config.num_return_sequences == 1 else config.num_return_sequences
        own = {"num_return_sequences": copies, "max_time": config.max_time}
        refuse_meaningless(own, "generation_config of the model: ")

    def _size(self, piece: int) -> tuple[int, int]:
        options = self._options(self.prompts[piece].options)
        limit = options.get("max_new_tokens", options.get("max_length"))
        return limit if isinstance(limit, int) else 0, self.prompts[piece].length

    def work(self, claims: Claims, file: RecordFile, bar: tqdm) -> None:
        """Run lines until all are done, by whomever."""
        with self.manager:
            while claims.done < claims.count:
                records = {**self._take(claims), **self._ended()}
                if records:
                    file.append(records.values())
                    claims.finish(records)
                bar.update(claims.done - bar.n)

    def _take(self, claims: Claims) -> dict[int, dict[str, Any]]:
        """Begin lines that nobody is at, as far as there is room; records of those that cannot run, by piece."""
        left = claims.count - claims.done
        room = min(self._places, -(-left // self.processes)) - len(self._held)
        refused = {}
        for _ in range(len(self._candidates)):
            if room <= 0:
                break
            piece = self._candidates.popleft()
            if claims.take(piece):
                failed = self._begin(piece)
                if failed is None:
                    room -= 1
                else:
                    refused[piece] = failed
            elif not claims.is_done(piece):
                self._candidates.append(piece)  # its process may die
        return refused

    def _begin(self, piece: int) -> dict[str, Any] | None:
        """Queue a line; the record of one that cannot run."""
        prompt = self.prompts[piece]
        try:
            token_ids = prompt.token_ids(self.tokenizer)
            arguments = self._arguments(prompt.options, prompt.line)
            job = self.manager.make_job(token_ids, f"line {prompt.line}", **arguments)
        except _FATAL:
            raise
        except Exception as error:  # of whatever kind, it is this line's
            return self._record(prompt, refusal("", [], error))
        seed = arguments.get("seed") if job.run.generation_config.do_sample else None
        self._held[job.request_id] = piece, job, seed
        self.manager.submit_job(job)
        return None

    def _arguments(self, own: dict[str, Any], line: int) -> dict[str, Any]:
        """Arguments of a request for a line with these options."""
        options = self._options(own)
        if options.get("do_sample", self.manager.generation_config.do_sample):
            options.setdefault("seed", self.settings.seed + line)
        if "stop_strings" in options:
            options["tokenizer"] = self.tokenizer
        return options

    def _options(self, own: dict[str, Any]) -> dict[str, Any]:
        """A line's options, and the defaults that they leave."""
        options = {name: value for name, value in self.settings.options.items() if value is not None}
        for length, new_tokens in _LENGTHS.items():
            if length in own:
                options.pop(new_tokens, None)
        return options | own

    def _ended(self) -> dict[int, dict[str, Any]]:
        """Wait for lines to end, not for long; their records by piece.

        Raises:
            RuntimeError: the model failed.
        """
        records, patience = {}, _POLL
        while (output := self.manager.get_result(timeout=patience)) is not None:
            if output.cause is not None and output.cause is self.manager.fatal_error:
                break
            piece, job, seed = self._held.pop(output.request_id)
            records[piece] = self._record(self.prompts[piece], output, job, seed)
            patience = 0.0
        if self.manager.fatal_error is not None:
            raise RuntimeError(
                f"the model failed: {self.manager.fatal_error!r}. The same command goes on with what is left."
            ) from self.manager.fatal_error
        return records

    def _record(
        self, prompt: Prompt, output: CDBGenerationOutput, job: Job | None = None, seed: int | None = None
    ) -> dict[str, Any]:
        tokens, depths = output.generated_tokens, output.exit_depths
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return {
            "line": prompt.line,
            "id": prompt.id,
            "text": text,
            "tokens": tokens,
            "exit_depths": depths,
            "mean_depth": output.mean_depth if depths else None,
            "prompt_tokens": len(output.prompt_ids),
            "finish_reason": "error" if output.error else "length" if _is_cut(job, tokens, text) else "stop",
            "seed": seed,
            "error": output.error,
        }


def _is_cut(job: Job, tokens: list[int], text: str) -> bool:
    """Whether a sequence ended by its limit alone."""
    config = job.run.generation_config
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    stops = [config.stop_strings] if isinstance(config.stop_strings, str) else config.stop_strings or []
    if len(tokens) < job.rows[0].max_new_tokens:
        return False
    return tokens[-1] not in ends and not any(stop in text for stop in stops)
