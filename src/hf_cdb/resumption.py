"""May a request go on after tokens that it brings?"""

from collections.abc import Sequence
from typing import Any

from .config import CDBConfig, least_depth
from .request import Request
from .setting_checks import is_integer

__all__ = ["check_resumption"]


def check_resumption(request: Request, config: CDBConfig, vocab: int) -> None:
    """Refuse tokens and depths that no run of the request could have left: what follows them would be of none, either.

    Args:
        request: with the engine's depths, rule and `prefill_exit` filled in.
        config: of the engine.
        vocab: ids of tokens lie below.

    Raises:
        ValueError: it cannot go on.
    """
    have = len(request.tokens)
    if len(request.exit_depths) != have or have >= request.max_new_tokens:
        raise ValueError(
            f"request {request.key} has {have} tokens of at most {request.max_new_tokens} and "
            f"{len(request.exit_depths)} depths: to go on it needs a depth for each, and room for more."
        )
    if have > 1 and config.kv_policy != "last_exited":
        raise ValueError(
            f"request {request.key} has {have} tokens, but with kv_policy={config.kv_policy!r} what a token reads of "
            "the others depends on when it runs, so they cannot run again in one pass. Add it without tokens, or use "
            "last_exited."
        )
    for token in request.tokens:
        if not is_integer(token) or not 0 <= token < vocab:
            raise ValueError(
                f"tokens of request {request.key} hold {token!r}: give those that came out, integers between 0 and "
                f"{vocab - 1}."
            )
    least = least_depth(request.min_depth, request.max_depth, config.lookahead)
    _check_depths(request, "exit_depths", request.exit_depths, least, full=0)
    leaves = request.prefill_exit and request.rule.name != "never" and request.prompt_length > 1
    if request.prompt_depths is not None:
        if len(request.prompt_depths) != request.prompt_length:
            raise ValueError(
                f"prompt_depths of request {request.key} has {len(request.prompt_depths)} depths, but its prompt has "
                f"{request.prompt_length} positions. Give a depth for each."
            )
        _check_depths(request, "prompt_depths", request.prompt_depths, least if leaves else request.max_depth, full=-1)
    elif leaves:
        raise ValueError(
            f"request {request.key} has tokens, and prefill_exit=True, but prompt_depths=None: how deep the positions "
            "of its prompt ran is lost. Give it, or add the request without tokens."
        )


def _check_depths(request: Request, name: str, depths: Sequence[Any], least: int, full: int) -> None:
    """Refuse depths that lie outside of the request's own, where that of one, the prompt's last position, is full."""
    for index, depth in enumerate(depths):
        if not is_integer(depth) or not least <= depth <= request.max_depth:
            raise ValueError(
                f"{name}[{index}] of request {request.key} is {depth!r}: with min_depth={request.min_depth}, "
                f"max_depth={request.max_depth} and prefill_exit={request.prefill_exit} it lies between {least} and "
                f"{request.max_depth}. Give the depths that it had, as integers."
            )
    if depths[full] != request.max_depth:
        raise ValueError(
            f"{name}[{full}] of request {request.key} is {depths[full]!r}, but the last position of a prompt, which "
            f"yields the first token, runs to max_depth={request.max_depth}. Give the depths that it had."
        )
