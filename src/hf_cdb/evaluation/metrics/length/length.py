"""How long answers are, and how many were cut off."""

import datasets
import evaluate


class Length(evaluate.Metric):
    def _info(self):
        count = datasets.Value("int64")
        return evaluate.MetricInfo(
            description="Predictions are numbers of new tokens, references 1 for answers that ended by themselves and "
            "0 for those that were cut off; gives the mean length and the share that was cut off.",
            citation="",
            features=datasets.Features({"predictions": count, "references": count}),
        )

    def scores(self, predictions, references):
        """`length` and `cut_off` of every answer."""
        pairs = zip(predictions, references, strict=True)
        return [{"length": float(length), "cut_off": float(not ended)} for length, ended in pairs]

    def _compute(self, predictions, references):
        scores = self.scores(predictions, references)
        return {name: sum(score[name] for score in scores) / len(scores) for name in ("length", "cut_off")}
