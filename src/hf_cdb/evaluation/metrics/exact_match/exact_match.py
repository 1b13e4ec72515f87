"""Exact match of answers, after one of the filters under which GSM8K is reported."""

import re

import datasets
import evaluate

_DESCRIPTION = """\
Share of predictions that equal their reference.

Filters, in the conventions of the GSM8K tasks of the evaluation harness lm_eval:
  whole:    the whole text, without white space around it
  strict:   the number after "####", the first of a text that has several
  flexible: the last number of the text
Of references the filters strict and flexible take what comes after "####", or all of it where there is none. Commas,
dollar signs and a full stop at the end of a number do not count. A prediction in which a filter finds nothing is wrong.
"""

_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")


def extract(text, filter):
    """What a filter finds in a text; None where that is nothing."""
    if filter == "whole":
        return text.strip()
    found = (_STRICT if filter == "strict" else _FLEXIBLE).findall(text)
    return plain(found[0 if filter == "strict" else -1]) if found else None


def plain(number):
    """A number without commas, dollar signs and a full stop at its end."""
    return number.strip().replace(",", "").replace("$", "").removesuffix(".")


class ExactMatch(evaluate.Metric):
    def _info(self):
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="Cobbe et al., Training Verifiers to Solve Math Word Problems, arXiv 2110.14168",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def scores(self, predictions, references, filter="whole"):
        """1.0 or 0.0 of every prediction."""
        if filter not in ("whole", "strict", "flexible"):
            raise ValueError(f"filter={filter!r}: choose whole, strict or flexible.")
        rights = [
            text.strip() if filter == "whole" else plain(text.rpartition("####")[2] or text) for text in references
        ]
        return [float(extract(text, filter) == right) for text, right in zip(predictions, rights, strict=True)]

    def _compute(self, predictions, references, filter="whole"):
        scores = self.scores(predictions, references, filter)
        return {"exact_match": sum(scores) / len(scores)}
