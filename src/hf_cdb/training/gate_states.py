"""States of a frozen looped model at every loop, teacher forced at full depth, cached for the training of a head."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers.cache_utils import Cache
from transformers.utils import logging

from ..adapters import LoopAdapter
from .gate_data import Row
from .gate_targets import LoopScores
from .passes import packed_mask

__all__ = ["LoopCache", "collect_states"]

logger = logging.get_logger(__name__)

_LAUNCH = 1024  # tokens that run at once
_IMPLEMENTATIONS = ("eager", "sdpa")  # those that read an additive mask


@dataclass
class LoopCache:
    """What the frozen model did with every predicted token.

    Attributes:
        adapter: of the model.
        inputs: number of states per token that the head reads: one per loop that has a signal, or one for preloop.
        width: channels of a state.
        scores: the outputs compared, over the tokens.
        weights: float32 `[tokens]`.
        sizes: int64 `[tokens]`, bytes of text that the predicted token stands for; -1 where not known.
        bytes: that the states take.
    """

    adapter: LoopAdapter
    inputs: int
    width: int
    scores: LoopScores
    weights: torch.Tensor
    sizes: torch.Tensor
    bytes: int
    _store: "_Memory | _Disk"

    def __len__(self) -> int:
        """Tokens."""
        return len(self.weights)

    def states(self, indices: torch.Tensor) -> torch.Tensor:
        """States `[n, width]` in at least float32, on the model's device.

        Args:
            indices: int64 `[n]`, `token * inputs + input`, inputs from 0: the loops 1, 2, ..., or the prelude's output.
        """
        return self._store.read(indices).to(self.adapter.device, torch.float32)

    def close(self) -> None:
        """Give up what is on disk."""
        self._store.close()


@torch.no_grad()
def collect_states(
    adapter: LoopAdapter,
    rows: Sequence[Row],
    kind: str,
    *,
    max_memory: int = 2 << 30,
    progress: bool = True,
) -> LoopCache:
    """Run the rows through the model at full depth and keep what a head of this kind reads.

    Every token but a row's first is predicted and counted; rows run packed, each attending to itself alone. States are
    kept in the model's dtype (float32 for float64), in memory up to `max_memory` bytes, else in a temporary `datasets`
    file.

    Args:
        adapter: of a model in evaluation mode.
        rows: at least one of two tokens or more.
        kind: of the head, see `hf_cdb.exit_heads`.
        max_memory: bytes.
        progress: show a bar.

    Raises:
        ValueError: an attention implementation that reads no additive mask, or no token with a weight above 0.
    """
    implementation = getattr(adapter.model.config, "_attn_implementation", "eager")
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"attn_implementation={implementation!r} does not read the mask that keeps packed rows apart. Load the "
            f"model with one of {', '.join(_IMPLEMENTATIONS)}."
        )
    inputs = {"preloop": 1, "lookahead": adapter.full_depth - 2}.get(kind, adapter.full_depth - 1)
    total = sum(sum(weight > 0 for weight in row.weights[1:]) for row in rows)
    if not total:
        raise ValueError("the rows have no predicted token with a weight above 0: there is nothing to learn from.")
    scores, weights, sizes, store, width = [], [], [], None, 0
    bar = tqdm(total=sum(len(row.ids) for row in rows), desc="states", unit="token", disable=not progress)
    with bar:
        for launch in _launches(rows):
            target = _Targets(launch, adapter.device)
            states, launch_scores = _run(adapter, launch, target, kind, inputs)
            if store is None:
                width = states.shape[-1]
                size = total * inputs * width * states.element_size()
                store = _Memory() if size <= max_memory else _Disk(inputs * width, states.dtype)
                place = "memory" if size <= max_memory else "a temporary file"
                logger.info(f"{total} tokens x {inputs} states of width {width}: {size / 2**20:.1f} MiB in {place}")
            store.write(states.flatten(1))
            scores.append(launch_scores)
            weights.append(target.weights.cpu())
            sizes.append(target.sizes.cpu())
            bar.update(sum(len(row.ids) for row in launch))
    store.finish(width)
    return LoopCache(adapter, inputs, width, LoopScores.cat(scores), torch.cat(weights), torch.cat(sizes), size, store)


class _Targets:
    """Which tokens of a launch are counted, and what follows each.

    Attributes:
        positions, segments: int64 `[tokens]`, position in its row, number of its row.
        counted: int64, the tokens whose successor has a weight.
        following: int64, the successors' ids; weights, sizes: theirs.
    """

    def __init__(self, launch: Sequence[Row], device: torch.device):
        positions, segments, counted, following, weights, sizes = [], [], [], [], [], []
        for number, row in enumerate(launch):
            first = len(positions)
            positions += range(len(row.ids))
            segments += [number] * len(row.ids)
            for index in range(1, len(row.ids)):
                if row.weights[index] > 0:
                    counted.append(first + index - 1)
                    following.append(row.ids[index])
                    weights.append(row.weights[index])
                    sizes.append(-1 if row.sizes is None else row.sizes[index])

        def integers(values):
            return torch.tensor(values, dtype=torch.long, device=device)

        self.positions, self.segments = integers(positions), integers(segments)
        self.counted, self.following, self.sizes = integers(counted), integers(following), integers(sizes)
        self.weights = torch.tensor(weights, device=device)


def _launches(rows: Sequence[Row]) -> Iterator[list[Row]]:
    launch, size = [], 0
    for row in rows:
        if not any(weight > 0 for weight in row.weights[1:]):
            continue
        if launch and size + len(row.ids) > _LAUNCH:
            yield launch
            launch, size = [], 0
        launch.append(row)
        size += len(row.ids)
    if launch:
        yield launch


def _run(
    adapter: LoopAdapter, launch: Sequence[Row], target: _Targets, kind: str, inputs: int
) -> tuple[torch.Tensor, LoopScores]:
    """States `[counted, inputs, width]` and scores of one launch."""
    position_ids = target.positions[None]
    mask = packed_mask(adapter, target.segments[None])
    layer_inputs = adapter.layer_inputs(position_ids, _NoPast(layers=[]), attention_mask=mask)
    ids = torch.tensor([[token for row in launch for token in row.ids]], device=adapter.device)
    embeds = adapter.prelude(ids, None, layer_inputs)
    state, after = adapter.start(embeds, position_ids), []
    for _ in range(adapter.full_depth):
        state = adapter.loop(state, embeds, layer_inputs)
        after.append(state)

    def log_probabilities(state):
        logits = adapter.coda(state, layer_inputs, keep=target.counted)
        return logits.float().log_softmax(-1)

    full = log_probabilities(after[-1])
    best, probability = full.argmax(-1), full.exp()
    kl, loss, agrees = [], [], []
    for state in after:
        now = full if state is after[-1] else log_probabilities(state)
        # Where a probability is zero the limit of p log p is.
        kl.append(torch.where(probability > 0, probability * (full - now), 0.0).sum(-1))
        loss.append(-now.gather(-1, target.following[:, None])[:, 0])
        agrees.append((now.argmax(-1) == best).float())
    scores = LoopScores(*(torch.stack(parts, dim=-1).cpu() for parts in (kl, loss, agrees)))
    read = [embeds] if kind == "preloop" else after[:inputs]
    states = torch.stack([part[0, target.counted] for part in read], dim=1)
    return states.to(torch.float32 if states.dtype == torch.float64 else states.dtype).cpu(), scores


class _NoPast(Cache):
    """A cache that keeps nothing: whole rows run at once."""

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        return key, value


class _Memory:
    """States as one tensor."""

    def __init__(self):
        self.parts: list[torch.Tensor] = []

    def write(self, states: torch.Tensor) -> None:
        self.parts.append(states)

    def finish(self, width: int) -> None:
        self.table = torch.cat(self.parts).view(-1, width)
        self.parts = []

    def read(self, indices: torch.Tensor) -> torch.Tensor:
        return self.table[indices]

    def close(self) -> None:
        self.table = None


class _Disk:
    """States as a `datasets` arrow file of one row a token, read through a memory map.

    bfloat16, which arrow does not know, is stored as float32.
    """

    def __init__(self, row: int, dtype: torch.dtype):
        from datasets import Features, List, Value
        from datasets.arrow_writer import ArrowWriter

        self.dtype = torch.float16 if dtype == torch.float16 else torch.float32
        self.folder = tempfile.TemporaryDirectory(prefix="hf-cdb-states-")
        self.path = str(Path(self.folder.name) / "states.arrow")
        value = Value("float16" if self.dtype == torch.float16 else "float32")
        self.writer = ArrowWriter(features=Features({"states": List(value, length=row)}), path=self.path)

    def write(self, states: torch.Tensor) -> None:
        self.writer.write_batch({"states": states.to(self.dtype).numpy()})

    def finish(self, width: int) -> None:
        from datasets import Dataset

        self.writer.finalize()
        self.writer.close()
        self.data, self.width = Dataset.from_file(self.path).with_format("numpy"), width
        self.inputs = self.data.features["states"].length // width

    def read(self, indices: torch.Tensor) -> torch.Tensor:
        tokens, where = (indices // self.inputs).unique(return_inverse=True)
        rows = torch.from_numpy(self.data[tokens.tolist()]["states"]).view(len(tokens), self.inputs, self.width)
        return rows[where, indices % self.inputs]

    def close(self) -> None:
        self.data = None
        self.folder.cleanup()
