"""From the arguments of a `generate` call to the engine's requests, one per row."""

import math
import numbers
from typing import Any

import torch
from transformers.utils import logging

from .adapters import LoopAdapter
from .config import CDBConfig, least_depth
from .criteria import Stops
from .exits import Replay
from .generation_arguments import refuse_unread
from .noise import Noise, derive_seed
from .request import Request
from .sampling import Sampler

__all__ = ["make_noise", "make_requests"]

logger = logging.get_logger(__name__)


def make_noise(config: CDBConfig, rows: int, adapter: LoopAdapter) -> Noise:
    shared = rows if rows <= config.max_num_seqs else None
    return Noise(shared, adapter.vocab_size, adapter.device)


def make_requests(
    input_ids: torch.Tensor,
    generation_config: Any,
    config: CDBConfig,
    sampler: Sampler,
    stops: Stops,
    model_kwargs: dict[str, Any],
) -> list[Request]:
    """One request per row: its prompt without padding, its limits, its seed."""
    rows = len(input_ids)
    copies = generation_config.num_return_sequences
    embeds = model_kwargs.get("inputs_embeds")
    refuse_unread(model_kwargs)
    if config.seeds is not None and not generation_config.do_sample:
        logger.warning_once("seeds has no effect: nothing is drawn with do_sample=False.")
    mask = _checked_mask(model_kwargs.get("attention_mask"), input_ids if embeds is None else embeds)
    limits = _token_limits(config, rows, copies, stops.max_new_tokens)
    _check_per_row(config, rows, copies, limits)
    requests = []
    for row in range(rows):
        keep = slice(None) if mask is None else mask[row]
        prompt = input_ids[row][keep] if embeds is None else None
        prompt_embeds = embeds[row][keep] if embeds is not None else None
        if len(prompt if embeds is None else prompt_embeds) == 0:
            raise ValueError(
                f"row {row} has no token: the prompt is empty, or attention_mask is 0 all over it. Give every prompt "
                "at least one token."
            )
        seed = None if config.seeds is None else derive_seed(config.seeds[row // copies], row % copies)
        requests.append(
            Request(
                key=row,
                row=row,
                seed=seed,
                prompt_ids=prompt,
                prompt_embeds=prompt_embeds,
                max_new_tokens=limits[row],
                sampler=sampler,
                stop=stops.row_ends,
                start_options=_start_options(model_kwargs, row, rows),
            )
        )
    return requests


def _checked_mask(mask: torch.Tensor | None, prompts: torch.Tensor) -> torch.Tensor | None:
    """Which positions are tokens, bool `[rows, positions]`; None where all are."""
    if not len(prompts):
        raise ValueError(f"the prompts have shape {tuple(prompts.shape)}: there is no row. Give at least one.")
    if mask is None:
        return None
    if mask.shape != prompts.shape[:2]:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}, but the prompts have {tuple(prompts.shape[:2])} positions. "
            "Give 1 for every token and 0 for all padding."
        )
    return mask.bool()


def _token_limits(config: CDBConfig, rows: int, copies: int, max_new_tokens: int) -> list[int]:
    """New tokens of every row at most; the return sequences of a prompt share its limit."""
    if config.token_limits is None:
        return [max_new_tokens] * rows
    if len(config.token_limits) != rows // copies:
        raise ValueError(
            f"token_limits has {len(config.token_limits)} entries, but there are {rows // copies} prompts. Give one "
            "for each."
        )
    return [min(max_new_tokens, config.token_limits[row // copies]) for row in range(rows)]


def _check_per_row(config: CDBConfig, rows: int, copies: int, limits: list[int]) -> None:
    prompts = rows // copies
    if config.seeds is not None and len(config.seeds) != prompts:
        raise ValueError(f"seeds has {len(config.seeds)} entries, but there are {prompts} prompts. Give one for each.")
    if isinstance(config.exit_rule, Replay):
        _check_replay(config, rows, copies, limits)


def _check_replay(config: CDBConfig, rows: int, copies: int, limits: list[int]) -> None:
    """Refuse depths that do not fit the call; the return sequences of a prompt share them."""
    rule, prompts = config.exit_rule, rows // copies
    if len(rule.depths) != prompts:
        raise ValueError(
            f"exit_depths has {len(rule.depths)} rows, but there are {prompts} prompts. Give one row for each; the "
            "return sequences of a prompt share it."
        )
    rule.copies = copies
    least = least_depth(config.min_depth, config.max_depth, config.lookahead)
    for row, depths in enumerate(rule.depths):
        if len(depths) < limits[row * copies]:
            raise ValueError(
                f"exit_depths row {row} has {len(depths)} depths, but up to {limits[row * copies]} tokens may come. "
                "Give a depth for each."
            )
        if depths[0] != config.max_depth:
            raise ValueError(
                f"exit_depths row {row} begins with {depths[0]}, but the prompt runs at full depth and so does its "
                f"token. Begin with {config.max_depth}."
            )
        wrong = [depth for depth in depths if not least <= depth <= config.max_depth]
        if wrong:
            raise ValueError(
                f"exit_depths row {row} holds {wrong[0]}; with min_depth={config.min_depth} and "
                f"lookahead={config.lookahead} depths lie between {least} and {config.max_depth}."
            )


def _start_options(model_kwargs: dict[str, Any], row: int, rows: int) -> dict[str, Any]:
    """Arguments of the start state for one row; `init_seed` is one number, or one per row, as the model takes it."""
    options = {}
    if model_kwargs.get("init_scale") is not None:
        scale = options["init_scale"] = model_kwargs["init_scale"]
        if isinstance(scale, bool) or not isinstance(scale, numbers.Real) or not 0 <= scale < math.inf:
            raise ValueError(f"init_scale={scale!r} is no scale: choose 0 (start at zero) or more.")
    seed = model_kwargs.get("init_seed")
    if seed is None:
        return options
    seeds = torch.as_tensor(seed)
    if seeds.is_floating_point() or seeds.dtype == torch.bool or seeds.numel() not in (1, rows):
        raise ValueError(
            f"init_seed={seed!r} is not what {rows} rows need: pass one integer, or a list or tensor with one per row."
        )
    options["init_seed"] = int(seeds.flatten()[row if seeds.numel() > 1 else 0])
    return options
