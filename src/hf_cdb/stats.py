"""What a run did, counted: launches, rows, depths, and the speed-up that the depths allow."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .scheduler import Launch
from .trace import Trace

__all__ = ["CDBStats", "RowStats", "flop_bound"]


def flop_bound(once: int, per_loop: int, full_depth: int, mean_depth: float, asked: float = 0.0) -> float:
    """Largest speed-up over full depth: `(F0 + R Fr) / (F0 + d Fr)` (arXiv 2608.09444).

    Rules that look at logits pay for them: what they cost per token stands beside `F0` below the line.

    Args:
        once: F0, parameters that run once per token.
        per_loop: Fr, parameters of one loop.
        full_depth: R.
        mean_depth: d, over all generated tokens.
        asked: parameters that the exit rule ran per token.
    """
    return (once + full_depth * per_loop) / (once + mean_depth * per_loop + asked)


@dataclass(frozen=True)
class RowStats:
    """What became of one row.

    Attributes:
        tokens: generated tokens.
        loops: loops run for them, the prompt's pass counted as those of the first.
        status: "finished"; "failed"; or "cancelled", where all rows were ended together, as `max_time` does it.
        error: why it failed.
    """

    tokens: int
    loops: int
    status: str
    error: BaseException | None = None

    @property
    def mean_depth(self) -> float:
        """Loops per generated token; 0 where there is none."""
        return self.loops / max(1, self.tokens)


@dataclass
class CDBStats:
    """Counts of one engine.

    Attributes:
        full_depth: R.
        max_num_seqs: W.
        launches: number of launches by stage.
        rows: rows that ran, by stage, summed over launches; `rows["loop"]` are the row-loops. A prompt in pieces
            counts once a loop.
        widths: by stage, how many launches had each width.
        depths: how many generated tokens left after each loop; prompts give one token at full depth.
        prompt_depths: likewise positions of prompts that are through.
        prompt_positions: positions that ran as prompts, each counted once; those of rows that come back, with their
            tokens, once more.
        reused_positions: those that were copied from another prompt instead, see `CDBConfig.prefix_reuse`.
        kv_bytes: keys and values of the core at their fullest moment, `kv_bytes_outer` those of the layers around it
            at theirs, `kv_bytes_peak` both together at their fullest.
        kv_bytes_reserved: memory taken for both at the largest moment: gaps between requests included, and what they
            may still grow into; where memory is mapped by the page, the pages that have been written.
        once, per_loop: parameters that run once per token and per loop.
        coda: parameters of the layers after the loop and the head.
        asked: "launches" and "rows" of the coda that the exit rule asked for, and "positions" of prompts.
        pressure: what a budget that was short cost: "preemptions"; "row_waits", launches that went by while a row stood
            without room for its next token, summed over rows; "offloaded_bytes"; "recomputed_positions" of rows that
            had to run again, which stand in no other count but that of launches and rows.
        trace: with `CDBConfig(trace=True)` every launch: what ran, the queues, start and duration.
    """

    full_depth: int
    max_num_seqs: int
    once: int
    per_loop: int
    coda: int = 0
    asked: Counter = field(default_factory=Counter)
    pressure: Counter = field(default_factory=Counter)
    launches: Counter = field(default_factory=Counter)
    rows: Counter = field(default_factory=Counter)
    widths: dict[str, Counter] = field(default_factory=dict)
    depths: Counter = field(default_factory=Counter)
    prompt_depths: Counter = field(default_factory=Counter)
    prompt_positions: int = 0
    reused_positions: int = 0
    kv_bytes: int = 0
    kv_bytes_outer: int = 0
    kv_bytes_peak: int = 0
    kv_bytes_reserved: int = 0
    trace: Trace | None = None

    def record(self, launch: Launch) -> None:
        """Count a launch that has run."""
        self.launches[launch.stage] += 1
        self.rows[launch.stage] += len(launch) - launch.continued
        if launch.pieces and launch.stage == "prelude":
            self.prompt_positions += sum(end - start for start, end in launch.pieces.values())
        self.widths.setdefault(launch.stage, Counter())[len(launch)] += 1
        if launch.growing:
            self.pressure["row_waits"] += launch.growing

    def save_trace(self, path: str | Path, format: str | None = None) -> None:
        """Write `trace` to a file, see `Trace.save`; `hf-cdb trace show` prints it.

        Raises:
            ValueError: nothing was traced, or the format is unknown.
        """
        if self.trace is None:
            raise ValueError(
                "there is no trace: this run did not record one. Set trace=True, as in cdb={'trace': True}."
            )
        self.trace.save(path, format)

    @property
    def tokens(self) -> int:
        """Generated tokens."""
        return sum(self.depths.values())

    @property
    def mean_depth(self) -> float:
        """Loops per generated token; full depth where there is none."""
        if not self.tokens:
            return float(self.full_depth)
        return sum(depth * count for depth, count in self.depths.items()) / self.tokens

    @property
    def mean_prompt_depth(self) -> float:
        """Loops per position of the prompts; full depth where there is none."""
        positions = sum(self.prompt_depths.values())
        if not positions:
            return float(self.full_depth)
        return sum(depth * count for depth, count in self.prompt_depths.items()) / positions

    @property
    def occupancy(self) -> float:
        """Mean width of the core's launches as a share of `max_num_seqs`."""
        ran = sum(width * count for width, count in self.widths.get("loop", {}).items())
        return ran / max(1, self.launches["loop"]) / self.max_num_seqs

    @property
    def flop_bound(self) -> float:
        """Speed-up over full depth without an exit rule that the executed depths allow."""
        asked = self.asked["rows"] * self.coda / max(1, self.tokens)
        return flop_bound(self.once, self.per_loop, self.full_depth, self.mean_depth, asked)

    @property
    def counted_speedup(self) -> float:
        """Speed-up over full depth in launches, each costing its stage's parameters whatever its width.

        The full-depth run of the same tokens is given full launches throughout, so what partly empty launches cost
        shows.
        """
        if not self.launches["loop"]:
            return 1.0
        width = min(self.max_num_seqs, max(self.widths["loop"]))
        full = self.tokens / width * (self.once + self.full_depth * self.per_loop)
        spent = self.launches["coda"] * self.once + self.launches["loop"] * self.per_loop
        spent += self.asked["launches"] * self.coda
        return full / spent

    @property
    def realised_share(self) -> float:
        """`counted_speedup` as a share of `flop_bound`."""
        return self.counted_speedup / self.flop_bound

    def to_dict(self) -> dict[str, Any]:
        """All counts and what follows from them, ready for JSON."""
        return {
            "tokens": self.tokens,
            "mean_depth": self.mean_depth,
            "depths": {depth: self.depths[depth] for depth in range(1, self.full_depth + 1)},
            "mean_prompt_depth": self.mean_prompt_depth,
            "prompt_depths": {depth: self.prompt_depths[depth] for depth in range(1, self.full_depth + 1)},
            "launches": dict(self.launches),
            "asked": dict(self.asked),
            "pressure": dict(self.pressure),
            "row_loops": self.rows["loop"],
            "widths": {stage: dict(sorted(widths.items())) for stage, widths in self.widths.items()},
            "occupancy": self.occupancy,
            "prompt_positions": self.prompt_positions,
            "reused_positions": self.reused_positions,
            "kv_bytes": self.kv_bytes,
            "kv_bytes_outer": self.kv_bytes_outer,
            "kv_bytes_peak": self.kv_bytes_peak,
            "kv_bytes_reserved": self.kv_bytes_reserved,
            "flop_bound": self.flop_bound,
            "counted_speedup": self.counted_speedup,
            "realised_share": self.realised_share,
        }
