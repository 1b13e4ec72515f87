"""What a system's runs are beside those of the engine at full depth.

Two measures, which are never mixed:

* **decode share**: speed-up over our own full depth in seconds per decoded token (steady state, prompts left out; the
  rule is that of `launches`), over the FLOP bound at the mean depth of the decoded tokens;
* **end-to-end share**: speed-up over our own full depth in seconds of the whole run, over the prefill-adjusted bound
  (arXiv 2608.09444): `1 / (P + (1 - P) w)` with `w = (1 / s - f) / (1 - f)`, where P is the share of prefill in the
  time of the full-depth run, f the share of first tokens and s the FLOP bound.

A system that differs from the full-depth run in more than depth, by its W, its full depth or settings such as
`prepack_weights`, has ratios, but neither share and no bound of a whole run; one of another full depth has no FLOP
bound either.
"""

from typing import Any

from ..stats import flop_bound
from .launches import decode_time, prefill_seconds, steady_state
from .ratios import Spread
from .systems import SYSTEMS, Run
from .workloads import Workload

__all__ = ["compare", "prefill_adjusted_bound"]

FIGURES = (
    "decode_speedup",
    "decode_flop_bound",
    "decode_share",
    "prefill_share",
    "prefill_adjusted_bound",
    "end_to_end_share",
    "steady_speedup",
)
# Of systems that differ in depth alone: at another W, say, they would compare widths and not depths.
SHARES = ("decode_share", "prefill_adjusted_bound", "end_to_end_share")


def compare(name: str, runs: dict[str, list[Run]], workload: Workload, in_depth_alone: bool = True) -> dict[str, Any]:
    """The figures of one system, ready for the table and the JSON; those of launches where launches were timed.

    Args:
        runs: by system its runs, one per turn; "full" among them.
        in_depth_alone: whether the settings differ from those of "full" in nothing but depth.
    """
    own, full = runs[name], runs["full"]
    label = SYSTEMS.get(name, f"{SYSTEMS['refill']}, {name}")
    row: dict[str, Any] = {"system": label, "seconds": Spread.of(run.seconds for run in own)}
    row["tokens_per_second"] = workload.tokens / row["seconds"].median
    row["speedup"] = _ratio(full, own)
    row["speedup_over_stock"] = _ratio(runs["stock"], own) if "stock" in runs else None
    if name not in SYSTEMS and "refill" in runs:
        row["speedup_over_refill"] = _ratio(runs["refill"], own)
    row["tokens_as_full_depth"] = _equal_tokens(own[-1], full[-1])
    stats = own[-1].stats
    if stats is None:
        return row
    row |= {"mean_depth": stats.mean_depth, "flop_bound": stats.flop_bound, "occupancy": stats.occupancy}
    if stats.mean_prompt_depth < stats.full_depth:
        row["mean_prompt_depth"] = stats.mean_prompt_depth
    reference = full[-1].stats
    if stats.full_depth != reference.full_depth:
        row["flop_bound"] = None  # it is one over the own full depth, and the ratios are over that of "full"
    row |= {"kv_bytes": stats.kv_bytes, "kv_bytes_outer": stats.kv_bytes_outer, "stats": stats.to_dict()}
    if stats.trace is None:
        return row
    steady = [steady_state(run.stats.trace, stats.max_num_seqs) for run in own]
    row["steady_tokens_per_second"] = Spread.of(one and one.tokens_per_second for one in steady)
    if name != "full":
        pairs = [_against_full(mine, theirs) for mine, theirs in zip(own, full, strict=True)]
        row |= {figure: Spread.of(pair[figure] for pair in pairs) for figure in FIGURES}
        alike = (stats.max_num_seqs, stats.full_depth) == (reference.max_num_seqs, reference.full_depth)
        if not (alike and in_depth_alone):
            row |= dict.fromkeys(SHARES)
    return row


def _ratio(reference: list[Run], own: list[Run]) -> Spread:
    return Spread.of(theirs.seconds / mine.seconds for theirs, mine in zip(reference, own, strict=True))


def _equal_tokens(own: Run, full: Run) -> float:
    """Share of the requests whose tokens are those of the engine at full depth: 1 for stock, but for rounding."""
    pairs = zip(own.tokens, full.tokens, strict=True)
    return sum(mine == theirs for mine, theirs in pairs) / len(full.tokens)


def _against_full(own: Run, full: Run) -> dict[str, float | None]:
    """What one run of the engine is beside the full-depth run of the same turn; None where it was too short to say."""
    times = [decode_time(run.stats.trace, run.stats.max_num_seqs) for run in (own, full)]
    steady = [steady_state(run.stats.trace, run.stats.max_num_seqs) for run in (own, full)]
    figures: dict[str, float | None] = dict.fromkeys(FIGURES)
    if None not in steady:
        figures["steady_speedup"] = steady[0].tokens_per_second / steady[1].tokens_per_second
    stats, full_depth = own.stats, full.stats.full_depth
    decoded = [depth for row in own.depths for depth in row[1:]]
    if None in times or not decoded:
        return figures
    depth = sum(decoded) / len(decoded)
    asked = stats.asked["rows"] * stats.coda / len(decoded)
    figures["decode_speedup"] = times[1].per_token(full_depth) / times[0].per_token(depth)
    figures["decode_flop_bound"] = flop_bound(stats.once, stats.per_loop, full_depth, depth, asked)
    figures["decode_share"] = figures["decode_speedup"] / figures["decode_flop_bound"]
    prefill = prefill_seconds(full.stats.trace, times[1]) / full.seconds
    bound = prefill_adjusted_bound(stats.flop_bound, prefill, len(own.depths) / stats.tokens)
    figures["prefill_share"], figures["prefill_adjusted_bound"] = prefill, bound
    figures["end_to_end_share"] = full.seconds / own.seconds / bound
    return figures


def prefill_adjusted_bound(bound: float, prefill_share: float, first_share: float) -> float:
    """Largest speed-up of a whole run: the FLOP bound holds for what is decoded, prompts stay at full depth.

    Args:
        bound: s, the FLOP bound over all tokens, those of the prompts at full depth included.
        prefill_share: P, of the full-depth run's time.
        first_share: f, first tokens among all tokens; less than 1.
    """
    decoded = (1 / bound - first_share) / (1 - first_share)
    return 1 / (prefill_share + (1 - prefill_share) * decoded)
