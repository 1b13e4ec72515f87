"""How far runs keep to the tokens of another run, such as that at full depth."""

import datasets
import evaluate

_DESCRIPTION = """\
Predictions and references are token ids of answers.

token_agreement:  mean share of a reference's tokens that come before the first difference; a missing or a further token
                  is a difference. 1 for two empty answers.
identical:        share of answers that are the same
first_divergence: mean index, from 0, of the first difference, over the answers that have one; None where all are the
                  same
"""


def first_difference(prediction, reference):
    """Index of the first token that two answers do not share; None where they are the same."""
    for place, (left, right) in enumerate(zip(prediction, reference, strict=False)):
        if left != right:
            return place
    return None if len(prediction) == len(reference) else min(len(prediction), len(reference))


class TokenAgreement(evaluate.Metric):
    def _info(self):
        ids = datasets.Sequence(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            features=datasets.Features({"predictions": ids, "references": ids}),
        )

    def scores(self, predictions, references):
        """`token_agreement`, `identical` and `first_divergence` of every answer."""
        found = []
        for prediction, reference in zip(predictions, references, strict=True):
            place = first_difference(list(prediction), list(reference))
            share = 1.0 if place is None else place / max(1, len(reference))
            found.append({"token_agreement": share, "identical": float(place is None), "first_divergence": place})
        return found

    def _compute(self, predictions, references):
        scores = self.scores(predictions, references)
        places = [score["first_divergence"] for score in scores if score["first_divergence"] is not None]
        return {
            "token_agreement": sum(score["token_agreement"] for score in scores) / len(scores),
            "identical": sum(score["identical"] for score in scores) / len(scores),
            "first_divergence": sum(places) / len(places) if places else None,
        }
