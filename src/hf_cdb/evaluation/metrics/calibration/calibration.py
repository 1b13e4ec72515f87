"""What an exit signal is worth: agreement with full depth by its score."""

import datasets
import evaluate
import numpy

_DESCRIPTION = """\
Predictions are scores of an exit rule after loops, references 1 where the most probable token was already that of full
depth, else 0.

bins: of equally many scores, from low to high: {"low", "high", "count", "agreement"}. Equal scores share a bin.
auc:  probability that the score of a loop that agrees is higher than that of one that does not, ties counted half; 0.5
      is no signal, and less than that is the rule of a rule that leaves below its threshold. None where all agree, or
      none.
not_finite: scores that are NaN or infinite, which are left out of both.
"""


class Calibration(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            features=datasets.Features(
                {"predictions": datasets.Value("float64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions, references, bins=10):
        scores = numpy.asarray(predictions, dtype=float)
        agrees = numpy.asarray(references, dtype=float)
        finite = numpy.isfinite(scores)
        scores, agrees, left_out = scores[finite], agrees[finite], int((~finite).sum())
        if not len(scores):
            return {"bins": [], "auc": None, "not_finite": left_out}
        # Inner edges belong to the bin below them.
        edges = numpy.unique(numpy.quantile(scores, numpy.linspace(0, 1, bins + 1)[1:-1], method="inverted_cdf"))
        member = numpy.searchsorted(edges, scores, side="left")
        rows = []
        for number in range(len(edges) + 1):
            inside = member == number
            if inside.any():
                rows.append(
                    {
                        "low": float(scores[inside].min()),
                        "high": float(scores[inside].max()),
                        "count": int(inside.sum()),
                        "agreement": float(agrees[inside].mean()),
                    }
                )
        return {"bins": rows, "auc": _auc(scores, agrees), "not_finite": left_out}


def _auc(scores, agrees):
    """Mann and Whitney's U over the number of pairs, from mean ranks."""
    right = int(agrees.sum())
    wrong = len(agrees) - right
    if not right or not wrong:
        return None
    _, place, counts = numpy.unique(scores, return_inverse=True, return_counts=True)
    ranks = (numpy.cumsum(counts) - (counts - 1) / 2)[place]
    return float((ranks[agrees > 0].sum() - right * (right + 1) / 2) / (right * wrong))
