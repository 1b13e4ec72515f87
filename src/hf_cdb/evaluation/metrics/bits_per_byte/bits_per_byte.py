"""Bits per byte and perplexity of texts."""

import datasets
import evaluate


class BitsPerByte(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description="Predictions are the bits, sum of -log2 p, that texts took, references their sizes in bytes; "
            "`tokens`, a list of their scored tokens, adds the perplexity of a token, 2 ** (bits / tokens).",
            citation="",
            features=datasets.Features(
                {"predictions": datasets.Value("float64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions, references, tokens=None):
        found = {"bits_per_byte": sum(predictions) / sum(references)}
        if tokens is not None:
            found["perplexity"] = 2 ** (sum(predictions) / sum(tokens))
        return found
