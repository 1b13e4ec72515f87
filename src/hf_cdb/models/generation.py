"""Plain `generate` of both families: the library's own, with one hint."""

from transformers.generation import GenerationMixin
from transformers.utils import logging

__all__ = ["LoopedGenerationMixin"]

logger = logging.get_logger(__name__)


class LoopedGenerationMixin(GenerationMixin):
    """`generate` as it is, with a warning where the tokenizer it is given ends sequences with another id.

    The published Ouro config names id 0 as the end while its chat format ends a turn with id 2, so an answer would
    run on to the length limit.
    """

    def _get_stopping_criteria(self, generation_config, stopping_criteria=None, tokenizer=None, **kwargs):
        end = getattr(tokenizer, "eos_token_id", None)
        ids = generation_config.eos_token_id
        ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
        if end is not None and end not in ids:
            logger.warning_once(
                f"The tokenizer ends a sequence with {tokenizer.eos_token!r} (id {end}), but generation stops at "
                f"eos_token_id={generation_config.eos_token_id} only. Pass eos_token_id={[*ids, end]}, or set it in "
                "model.generation_config."
            )
        return super()._get_stopping_criteria(generation_config, stopping_criteria, tokenizer=tokenizer, **kwargs)
