"""What a request to the server may say. Names and meaning are OpenAI's; `cdb` holds this package's own."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

__all__ = ["Body", "ChatBody", "CompletionBody"]

Count = Annotated[int, Field(ge=0, lt=2**31)]
Size = Annotated[int, Field(gt=0, lt=2**31)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Text = Annotated[str, Field(min_length=1)]
# Finding the tokens that stop strings may end in takes time, and others wait meanwhile.
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]


class _Strict(BaseModel):
    """A name that does not exist is an error, and so is a text where a number is asked for."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        """Clients write null for what they leave out."""
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None or name not in cls.model_fields}


class CDBFields(_Strict):
    """Depth and schedule of this request; see `CDBManager.add_request`. What is left out is as the server was started.

    Attributes:
        exit_rule, exit_threshold, min_depth, max_depth: as in `CDBConfig`.
        exit_depths: replay these, one for every new token at least.
        deadline: seconds from now until which it has to be done; else it fails with status 504.
        priority: higher ones start first.
    """

    exit_rule: str | None = None
    exit_threshold: FiniteFloat | None = None
    min_depth: Size | None = None
    max_depth: Size | None = None
    exit_depths: list[Size] | None = None
    deadline: Annotated[FiniteFloat, Field(gt=0)] | None = None
    priority: int = 0


class StreamOptions(_Strict):
    """What a stream tells beside the text.

    Attributes:
        include_usage: the usage, in an event of its own at the end.
        continuous_usage_stats: the usage so far, in every event with text; not OpenAI's: load generators ask for it.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Body(_Strict):
    """What both kinds of request share.

    Of OpenAI's fields, those that this server does not have may be given the value that changes nothing.

    Attributes:
        temperature: 0 is greedy, and any other samples; without it the model's generation config decides.
        top_k, min_p, repetition_penalty, min_tokens, ignore_eos: not OpenAI's; as other servers have them.
    """

    model: str | None = None
    max_tokens: Size | None = None
    min_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    top_k: Size | None = None
    min_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[FiniteFloat, Field(gt=0)] | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=1024)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    ignore_eos: bool = False
    n: Annotated[int, Field(ge=1, le=128)] = 1
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    cdb: CDBFields = CDBFields()

    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None

    @property
    def limit(self) -> int | None:
        """New tokens at most, as far as the request says."""
        return self.max_tokens

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def options(self, vocab_size: int) -> dict[str, Any]:
        """Arguments of `CDBManager.add_request`, but for the prompt, the number of tokens and what ends a sequence."""
        options = {
            "temperature": self.temperature or None,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "min_new_tokens": self.min_tokens,
            "seed": self.seed,
            "num_return_sequences": self.n if self.n > 1 else None,
            "eos_token_id": vocab_size if self.ignore_eos else None,  # no token has this number
            **self.cdb.model_dump(),
        }
        if self.temperature is not None:
            options["do_sample"] = self.temperature > 0
        elif any(value is not None for value in (self.top_p, self.top_k, self.min_p)):
            options["do_sample"] = True
        if self.logit_bias:
            options["sequence_bias"] = {(int(token),): bias for token, bias in self.logit_bias.items()}
        return {name: value for name, value in options.items() if value is not None}


class CompletionBody(Body):
    """Of `/v1/completions`.

    Attributes:
        prompt: a text, token ids, or a list of either, each of which is continued.
    """

    prompt: Text | Tokens | Annotated[list[Text], Field(min_length=1)] | Annotated[list[Tokens], Field(min_length=1)]
    logprobs: None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        several = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return self.prompt if several else [self.prompt]


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    role: str
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(Body):
    """Of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Size | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
