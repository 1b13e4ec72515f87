"""Training batches: windows of the text and packed lines of the tasks, each batch a pure function of seed and step."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy
import torch
from transformers import PreTrainedTokenizerBase

from .tasks import TASKS, Example, split_of
from .text import chapters

__all__ = ["NO_SEGMENT", "NO_TARGET", "Line", "PackedBatches", "block_mask", "encode_lines", "pack_lines"]

NO_TARGET = -100  # what torch's cross-entropy leaves out
NO_SEGMENT = -1


@dataclass(frozen=True)
class Line:
    """A task line as tokens.

    Attributes:
        inputs: BOS, the prompt, the answer.
        targets: the token that follows each of them; the last is EOS.
        answer_start: index of the first target that belongs to the answer.
    """

    inputs: list[int]
    targets: list[int]
    answer_start: int


def encode_lines(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]) -> list[Line]:
    """Tokens of every example; prompt and answer are encoded each by itself, as in generation."""
    texts = [text for example in examples for text in (example.prompt, example.answer)]
    # The backend itself: the wrapper would spend more time on its output than on the encoding.
    encoded = [row.ids for row in tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    return [
        Line([bos, *prompt, *answer], [*prompt, *answer, eos], len(prompt))
        for prompt, answer in zip(encoded[::2], encoded[1::2], strict=True)
    ]


def pack_lines(
    lines: Iterable[Line], length: int, *, pad: int, rows: int | None = None, prompt_weight: float = 1.0
) -> dict[str, torch.Tensor]:
    """Lines one after the other in rows; a line that does not fit any more begins the next row.

    Args:
        lines: in the order in which they are to be packed; with `rows`, more may be given than fit.
        length: tokens of a row.
        pad: token id of what is left over.
        rows: rows to make; by default as many as the lines need.
        prompt_weight: weight of the targets that belong to a prompt.

    Returns:
        Tensors as in `PackedBatches.batch`.

    Raises:
        ValueError: a line longer than a row.
    """
    packed: list[list[Line]] = [[]]
    used = 0
    for line in lines:
        size = len(line.inputs)
        if size > length:
            raise ValueError(f"length={length} is less than the {size} tokens of a line. Choose longer rows.")
        if used + size > length:
            if len(packed) == rows:
                break
            packed.append([])
            used = 0
        packed[-1].append(line)
        used += size
    shape = (len(packed) if rows is None else rows, length)
    batch = _empty(shape, pad)
    for row, members in enumerate(packed):
        start = 0
        for segment, line in enumerate(members):
            place = row, slice(start, start + len(line.inputs))
            batch["input_ids"][place] = line.inputs
            batch["position_ids"][place] = numpy.arange(len(line.inputs))
            batch["segments"][place] = segment
            batch["targets"][place] = line.targets
            batch["weights"][place] = prompt_weight
            batch["weights"][row, start + line.answer_start : start + len(line.inputs)] = 1.0
            start += len(line.inputs)
    return {name: torch.from_numpy(values) for name, values in batch.items()}


def _empty(shape: tuple[int, int], pad: int) -> dict[str, numpy.ndarray]:
    return {
        "input_ids": numpy.full(shape, pad, dtype=numpy.int64),
        "position_ids": numpy.zeros(shape, dtype=numpy.int64),
        "segments": numpy.full(shape, NO_SEGMENT, dtype=numpy.int64),
        "targets": numpy.full(shape, NO_TARGET, dtype=numpy.int64),
        "weights": numpy.zeros(shape, dtype=numpy.float32),
    }


def block_mask(segments: torch.Tensor) -> torch.Tensor:
    """Which key each query attends to: those of its segment up to itself.

    Padding attends to padding, so that no query is left without a key.

    Args:
        segments: int64 `[rows, length]`.

    Returns:
        bool `[rows, 1, length, length]` (queries, keys), for `attention_mask`.
    """
    length = segments.shape[-1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    return ((segments[:, :, None] == segments[:, None, :]) & causal)[:, None]


class PackedBatches:
    """Batches for training: rows of text first, rows of task lines after them.

    Nothing is kept between batches, so a run that resumes at a step sees what an unbroken one sees.

    Args:
        tokenizer: of `train_tokenizer`, or another one with pad, BOS and EOS.
        length: tokens of a row.
        text_rows: rows that are windows of the training chapters, put one after the other.
        task_rows: rows packed with task lines of the training split.
        seed: of windows and lines.
        prompt_weight: weight of a task prompt's tokens in the loss; text and answers have 1.
        task_shares: how often lines of each task are drawn, relative to each other; default all alike. A task that is
            left out is not drawn.
        texts: what to read in place of the training chapters.

    Raises:
        ValueError: no row, unknown tasks, shares that are no shares, or a row longer than the text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        length: int = 128,
        text_rows: int = 10,
        task_rows: int = 14,
        seed: int = 0,
        prompt_weight: float = 0.1,
        task_shares: dict[str, float] | None = None,
        texts: Sequence[str] | None = None,
    ):
        if min(text_rows, task_rows) < 0 or text_rows + task_rows == 0:
            raise ValueError(f"text_rows={text_rows}, task_rows={task_rows}: choose 0 or more, and one of them above.")
        if not 0 <= prompt_weight < float("inf"):
            raise ValueError(f"prompt_weight={prompt_weight!r} is no weight: choose 0 or more.")
        shares = dict.fromkeys(TASKS, 1.0) if task_shares is None else dict(task_shares)
        if unknown := [name for name in shares if name not in TASKS]:
            raise ValueError(f"task_shares: {', '.join(unknown)} unknown. Tasks are {', '.join(TASKS)}.")
        if task_rows and (min(shares.values(), default=0) < 0 or not 0 < sum(shares.values()) < float("inf")):
            raise ValueError(f"task_shares={shares}: choose 0 or more for each, and one of them above.")
        self.tokenizer, self.length, self.seed = tokenizer, length, seed
        self.text_rows, self.task_rows, self.prompt_weight = text_rows, task_rows, prompt_weight
        self._tasks, self._shares = [TASKS[name] for name in shares], list(shares.values())
        if text_rows:
            self._read(chapters("train") if texts is None else texts)

    def _read(self, texts: Sequence[str]) -> None:
        """All texts as one stream of inputs and targets, EOS after the last token of each."""
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        encoded = self.tokenizer.backend_tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ids = [row.ids for row in encoded]
        sizes = [len(row) + 1 for row in ids]
        self._inputs = numpy.array([token for row in ids for token in (bos, *row)], dtype=numpy.int64)
        self._targets = numpy.array([token for row in ids for token in (*row, eos)], dtype=numpy.int64)
        self._text_of = numpy.repeat(numpy.arange(len(ids)), sizes)
        self._position = numpy.concatenate([numpy.arange(size) for size in sizes])
        if self.length > len(self._inputs):
            raise ValueError(
                f"length={self.length} exceeds the text's {len(self._inputs)} tokens. Choose shorter rows or more text."
            )

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """The batch of one step, counted from 0; rows = text_rows + task_rows.

        A window of text begins anywhere, at position 0; a chapter that begins inside it starts a new segment with
        BOS. A task line is a segment.

        Returns:
            input_ids: int64 `[rows, length]`.
            position_ids: int64, counted from 0 in every segment; 0 at padding.
            segments: int64, number of the segment in its row, -1 at padding.
            targets: int64, the token that follows, EOS after a chapter or an answer; -100 at padding. EOS is a
                target only, never an input.
            weights: float32: 1 for text, answers and EOS, `prompt_weight` for prompts, 0 at padding.
        """
        parts = []
        if self.text_rows:
            parts.append(self._text(random.Random(f"text/{self.seed}/{step}")))
        if self.task_rows:
            lines = self._lines(random.Random(f"tasks/{self.seed}/{step}"))
            pad = self.tokenizer.pad_token_id
            parts.append(pack_lines(lines, self.length, pad=pad, rows=self.task_rows, prompt_weight=self.prompt_weight))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _text(self, rng: random.Random) -> dict[str, torch.Tensor]:
        starts = [rng.randrange(len(self._inputs) - self.length + 1) for _ in range(self.text_rows)]
        places = numpy.array(starts)[:, None] + numpy.arange(self.length)
        segments = self._text_of[places]
        segments -= segments[:, :1]
        positions = self._position[places]
        positions -= numpy.where(segments == 0, positions[:, :1], 0)
        batch = {
            "input_ids": self._inputs[places],
            "position_ids": positions,
            "segments": segments,
            "targets": self._targets[places],
            "weights": numpy.ones(places.shape, dtype=numpy.float32),
        }
        return {name: torch.from_numpy(values) for name, values in batch.items()}

    def _lines(self, rng: random.Random) -> Iterable[Line]:
        """Lines of the training split without end, a row's worth encoded at a time."""
        while True:
            tasks = rng.choices(self._tasks, self._shares, k=self.length)
            drawn = [task.draw(rng) for task in tasks]
            yield from encode_lines(self.tokenizer, [x for x in drawn if split_of(x.prompt) == "train"])
