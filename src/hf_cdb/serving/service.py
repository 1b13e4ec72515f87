"""One model and who may ask it. Knows no HTTP."""

import asyncio
from collections.abc import Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..adapters import adapter_for
from ..jobs import CDBGenerationOutput
from ..manager import CDBManager
from .bodies import Body, ChatBody, CompletionBody
from .generation import Generation, RefusedError
from .metrics import Metrics

__all__ = ["Service"]

logger = logging.get_logger(__name__)

DEFAULT_TOKENS = 1024  # where a request names no limit, as in Transformers' server


class Service:
    """One model, its tokenizer and its manager.

    Args:
        model, tokenizer: of one checkpoint.
        name: what clients call the model.
        manager: of that model; it is started with the service.
        max_queue: sequences that have not ended at most, beyond which requests are refused.
        restarts: how often the manager is started again after an error of the model has ended its thread.

    Attributes:
        stopping: `stop` has been called; what fails from then on fails for that.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        manager: CDBManager,
        max_queue: int = 1024,
        restarts: int = 3,
    ):
        self.tokenizer, self.name, self.manager = tokenizer, name, manager
        self.max_queue, self.restarts = max_queue, restarts
        self.metrics = Metrics(manager)
        self.vocab_size = adapter_for(model).vocab_size
        self.context = model.config.get_text_config().max_position_embeddings
        ends = manager.generation_config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends])
        self._open = 0
        self.stopping = False

    def start(self) -> None:
        self.stopping = False
        self.manager.start()

    def stop(self) -> None:
        """End at once; what is left fails."""
        self.stopping = True  # before anything fails of it
        self.manager.stop(hard_stop=True)

    @property
    def fatal_error(self) -> BaseException | None:
        """What has ended the manager's thread; None while it runs."""
        return self.manager.fatal_error

    def prompts(self, body: Body) -> list[list[int]]:
        """Token ids of every prompt of a request.

        Raises:
            RefusedError: no such model, messages that its template refuses, or a bias for ids that it does not have.
        """
        if body.model is not None and body.model != self.name:
            raise RefusedError(404, f"model={body.model!r} is not served here. There is {self.name!r}.")
        for token in body.logit_bias or ():
            if not token.isdecimal() or len(token) > 9 or int(token) >= self.vocab_size:
                raise RefusedError(
                    400, f"logit_bias names {token[:20]!r}: the model has ids 0 to {self.vocab_size - 1}."
                )
        return [self._chat(body)] if isinstance(body, ChatBody) else self._texts(body)

    def _texts(self, body: CompletionBody) -> list[list[int]]:
        try:
            return [self.tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt for prompt in body.prompts]
        except (TypeError, UnicodeError) as error:  # halves of characters, as JSON may hold them
            raise RefusedError(400, f"prompt: the tokenizer cannot read it: {error}") from error

    def _chat(self, body: ChatBody) -> list[int]:
        messages = [{"role": message.role, "content": message.text} for message in body.messages]
        try:
            chat = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        except Exception as error:  # templates raise what they like about messages that they do not take
            raise RefusedError(400, f"the model's chat template refuses these messages: {error}") from error
        return chat["input_ids"]

    def limit(self, body: Body, prompt: Sequence[int]) -> int:
        """New tokens of a prompt at most.

        Raises:
            RefusedError: they do not fit behind it.
        """
        room = self.context - len(prompt)
        if room < 1 or (body.limit or 1) > room:
            raise RefusedError(
                400,
                f"the prompt has {len(prompt)} tokens and max_tokens={body.limit}, but the model was trained for "
                f"{self.context} together. Shorten one of them.",
            )
        return body.limit or min(DEFAULT_TOKENS, room)

    async def generate(self, body: Body, arrived: float) -> Generation:
        """Queue what a request asks for.

        Args:
            arrived: when it came, of `time.perf_counter`: its deadline and its times count from then.

        Raises:
            RefusedError: it cannot be served.
        """
        try:
            prompts = await asyncio.to_thread(self.prompts, body)  # a long text takes seconds
            limits = [self.limit(body, prompt) for prompt in prompts]
            self._check_room(len(prompts) * body.n)
            self._revive()
            generation = Generation(self, body, prompts, limits, arrived)
            self._open += len(generation)
            try:
                await generation.submit()
            except BaseException:
                generation.close()
                raise
        except RefusedError:
            self.metrics.refused()
            raise
        return generation

    def _check_room(self, sequences: int) -> None:
        if self._open + sequences > self.max_queue:
            raise RefusedError(
                429,
                f"there are {self._open} sequences, and {sequences} more exceed max_queue={self.max_queue}. Try again "
                "later.",
            )

    def _revive(self) -> None:
        """Start the manager again where an error of the model has ended it."""
        if self.fatal_error is None or self.manager.is_running():
            return
        if not self.restarts:
            raise RefusedError(503, f"the model has failed: {self.fatal_error!r}. Restart the server.")
        self.restarts -= 1
        logger.warning(f"The model has failed with {self.fatal_error!r}; the manager is started again.")
        self.manager.start()
        self.metrics.restarted()

    def closed(self, generation: Generation) -> None:
        """Told of every generation once."""
        self._open -= len(generation)

    def finish_reason(self, output: CDBGenerationOutput, limit: int, stopped: bool, ignore_eos: bool) -> str:
        """Why a sequence ended, in OpenAI's words."""
        tokens = output.generated_tokens
        ended = stopped or len(tokens) < limit or (not ignore_eos and tokens[-1] in self._ends)
        return "stop" if ended else "length"
