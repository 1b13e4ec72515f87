"""ROUGE of answers, by the package rouge_score."""

import datasets
import evaluate
from rouge_score import rouge_scorer


class Rouge(evaluate.Metric):
    def _info(self):
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description="F-measure of ROUGE, with stemming; variant rouge1, rouge2 or rougeL.",
            citation="Lin, ROUGE: A Package for Automatic Evaluation of Summaries, W04-1013",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def scores(self, predictions, references, variant="rougeL"):
        """F-measure of every prediction, in [0, 1]."""
        scorer = rouge_scorer.RougeScorer([variant], use_stemmer=True)
        pairs = zip(predictions, references, strict=True)
        return [scorer.score(reference, prediction)[variant].fmeasure for prediction, reference in pairs]

    def _compute(self, predictions, references, variant="rougeL"):
        scores = self.scores(predictions, references, variant)
        return {variant: sum(scores) / len(scores)}
