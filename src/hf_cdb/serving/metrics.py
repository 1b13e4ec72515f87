"""What `/metrics` tells, in Prometheus' text format."""

from collections import Counter as Counts
from collections.abc import Iterator
from dataclasses import replace

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..jobs import CDBGenerationOutput
from ..manager import CDBManager
from ..stats import CDBStats

__all__ = ["Metrics"]

_TIMES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_TIMES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """Counts of one server, in a registry of its own.

    Args:
        manager: is asked for its own figures whenever somebody reads.
    """

    def __init__(self, manager: CDBManager):
        self._registry = CollectorRegistry()
        self._registry.register(_ManagerFigures(manager))

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _TIMES) -> Histogram:
            return Histogram(name, text, buckets=buckets, registry=self._registry)

        self._queue = histogram("hf_cdb_queue_seconds", "From the arrival until the first launch has run.")
        self._ttft = histogram("hf_cdb_time_to_first_token_seconds", "From the arrival to the first token.")
        self._tpot = histogram(
            "hf_cdb_time_per_output_token_seconds", "Mean time of the tokens after the first.", _TOKEN_TIMES
        )
        self._whole = histogram("hf_cdb_request_seconds", "From the arrival to the last token.")
        self._prompt_tokens = Counter("hf_cdb_prompt_tokens", "Of finished sequences.", registry=self._registry)
        self._sequences = Counter("hf_cdb_sequences", "By how they ended.", ["outcome"], registry=self._registry)
        self._refused = Counter("hf_cdb_refused_requests", "Answered with an error at once.", registry=self._registry)
        self._restarts = Counter("hf_cdb_restarts", "Of the thread, after errors.", registry=self._registry)
        for outcome in ("finished", "failed", "cancelled"):
            self._sequences.labels(outcome)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def ended(self, output: CDBGenerationOutput) -> None:
        """Take in a last output, which has timestamps."""
        if output.error is not None:
            self._sequences.labels("failed").inc()
            return
        self._sequences.labels("finished").inc()
        self._prompt_tokens.inc(len(output.prompt_ids))
        started, ended = output.lifespan
        first, *later = output.timestamps
        self._queue.observe(started - output.created_time)
        self._ttft.observe(first - output.created_time)
        self._whole.observe(ended - output.created_time)
        if later:
            self._tpot.observe((later[-1] - first) / len(later))

    def ended_early(self, outcome: str) -> None:
        """A sequence was ended with its request, "failed" or "cancelled", before it had a last output."""
        self._sequences.labels(outcome).inc()

    def refused(self) -> None:
        self._refused.inc()

    def restarted(self) -> None:
        self._restarts.inc()


class _ManagerFigures(Collector):
    def __init__(self, manager: CDBManager):
        self._manager = manager

    def collect(self) -> Iterator[Metric]:
        manager, stats = self._manager, _copy(self._manager.stats)
        gauges = {
            "waiting_sequences": ("That hold no place: not started, or preempted.", manager.waiting),
            "running_sequences": ("In flight.", manager.running),
            "kv_bytes": ("Keys and values of what is in flight, and of prompts that are kept.", manager.kv_bytes),
            "kv_reserved_bytes": ("The same with the gaps between.", manager.reserved_bytes),
            "occupancy": ("Mean width of the loop's launches as a share of max_num_seqs.", stats.occupancy),
            "mean_depth": ("Loops per generated token.", stats.mean_depth),
            "flop_bound": ("Largest speed-up over full depth that the depths allow.", stats.flop_bound),
            "realised_share": ("Counted speed-up as a share of the FLOP bound.", stats.realised_share),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"hf_cdb_{name}", text, value=value)
        counts = {
            "preemptions": ("Sequences that gave up their room to others.", stats.pressure["preemptions"]),
            "recomputed_positions": ("That had to run again for it.", stats.pressure["recomputed_positions"]),
            "reused_positions": ("Of prompts, copied from others that begin alike.", stats.reused_positions),
        }
        for name, (text, value) in counts.items():
            yield CounterMetricFamily(f"hf_cdb_{name}", text, value=value)
        yield _depths(stats)


def _copy(stats: CDBStats) -> CDBStats:
    """A snapshot: the manager's thread counts on, and copying a dict is one step for Python."""
    return replace(
        stats,
        **{name: Counts(getattr(stats, name)) for name in ("asked", "launches", "pressure", "rows", "depths")},
        widths={stage: Counts(widths) for stage, widths in dict(stats.widths).items()},
        trace=None,
    )


def _depths(stats: CDBStats) -> HistogramMetricFamily:
    buckets, count = [], 0
    for depth in range(1, stats.full_depth + 1):
        count += stats.depths[depth]
        buckets.append((str(float(depth)), count))
    loops = sum(depth * number for depth, number in stats.depths.items())
    return HistogramMetricFamily(
        "hf_cdb_exit_depth", "Loops of every generated token.", buckets=[*buckets, ("+Inf", count)], sum_value=loops
    )
