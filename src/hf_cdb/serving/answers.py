"""Answers in the form of OpenAI's: whole, or in pieces by server-sent events."""

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from .bodies import ChatBody
from .generation import Generation, RefusedError
from .texts import StoppedText

__all__ = ["Answer", "error_content"]


def error_content(status: int, message: str) -> dict[str, Any]:
    """The body of an answer that is an error."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    message = message.encode(errors="backslashreplace").decode()  # halves of characters, as JSON may hold them
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


class Answer:
    """The answer to a request while its sequences run."""

    def __init__(self, generation: Generation):
        self.generation, self.body = generation, generation.body
        self.chat = isinstance(self.body, ChatBody)
        self._about = {
            "id": ("chatcmpl-" if self.chat else "cmpl-") + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": generation.service.name,
        }
        tokenizer = generation.service.tokenizer
        self._texts = [StoppedText(tokenizer, self.body.stops) for _ in range(len(generation))]

    async def whole(self) -> dict[str, Any]:
        """Once all sequences have ended.

        Raises:
            RefusedError: one failed.
        """
        choices = [{}] * len(self.generation)
        async for index, output in self.generation.new_outputs():
            text = self._texts[index].push(output.generated_tokens, last=True)
            content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            reason = self._finish_reason(index)
            choices[index] = {"index": index, **content, "logprobs": None, "finish_reason": reason}
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._about, "object": kind, "choices": choices, "usage": self.generation.usage()}

    async def events(self) -> AsyncIterator[str]:
        """Pieces as they come. An error ends them, and is the last."""
        options = self.body.stream_options
        if self.chat:
            for index in range(len(self.generation)):
                yield self._event([self._piece(index, {"role": "assistant", "content": ""}, None)])
        try:
            async for index, output in self.generation.new_outputs():
                last = output.is_finished()
                text = self._texts[index].push(output.generated_tokens, last)
                if text or last:
                    content = {"content": text} if self.chat else {"text": text}
                    usage = {"usage": self.generation.usage()} if options.continuous_usage_stats else {}
                    reason = self._finish_reason(index) if last else None
                    yield self._event([self._piece(index, content, reason)], **usage)
        except RefusedError as error:
            yield f"data: {json.dumps(error_content(error.status, str(error)))}\n\n"
            return
        if options.include_usage:
            yield self._event([], usage=self.generation.usage())
        yield "data: [DONE]\n\n"

    def _piece(self, index: int, content: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        content = {"delta": content} if self.chat else content
        return {"index": index, **content, "logprobs": None, "finish_reason": finish_reason}

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return f"data: {json.dumps({**self._about, 'object': kind, 'choices': choices, **more})}\n\n"

    def _finish_reason(self, index: int) -> str:
        generation = self.generation
        limit = generation.limits[index // self.body.n]
        stopped, ignore_eos = self._texts[index].stopped, self.body.ignore_eos
        return generation.service.finish_reason(generation.outputs[index], limit, stopped, ignore_eos)
