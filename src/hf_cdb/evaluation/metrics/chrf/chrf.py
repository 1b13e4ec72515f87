"""chrF of answers, by the package sacrebleu."""

import datasets
import evaluate
from sacrebleu.metrics import CHRF


class Chrf(evaluate.Metric):
    def _info(self):
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description="Mean over sentences of chrF2, or of chrF2++ with word bigrams, divided by 100.",
            citation="Popović, chrF: character n-gram F-score for automatic MT evaluation, W15-3049",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def scores(self, predictions, references, variant="chrF2"):
        """chrF of every prediction, in [0, 1]."""
        scorer = CHRF(word_order=2 if variant == "chrF2++" else 0)
        pairs = zip(predictions, references, strict=True)
        return [scorer.sentence_score(prediction, [reference]).score / 100 for prediction, reference in pairs]

    def _compute(self, predictions, references, variant="chrF2"):
        scores = self.scores(predictions, references, variant)
        return {variant: sum(scores) / len(scores)}
