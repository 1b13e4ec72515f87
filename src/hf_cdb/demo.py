"""`make demo`: text and tasks on the embedded checkpoints, generated with cdb off and on.

Under every token stands the loop it left at, and in a terminal its colour says the same: easy tokens leave early.
"""

import os
import statistics
import sys
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.generation import GenerateDecoderOnlyOutput

from .checkpoints import tiny_checkpoint
from .generation import GenerateCDBOutput

PROMPTS = (
    "And it came to pass, when the king heard",
    "The LORD is my",
    "In the beginning",
    "Blessed are they that",
    "sort:KDBHCA=",
    "add:458+367=",
    "parity:480213=",
    "chain:7+5-3+8=",
    "hops:AC,EB,CD,BA,DE:C3=",
)
NEW_TOKENS = 32
TURNS = 3
# Colours of a terminal with 256 of them, from shallow to deep.
COLOURS = (40, 112, 184, 214, 208, 202, 196, 160)


def main() -> None:
    torch.set_num_threads(1)
    for name in ("ouro", "huginn"):
        show(name)


def show(name: str) -> None:
    folder = tiny_checkpoint(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    inputs = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)

    def generate(cdb):
        begin = time.perf_counter()
        output = model.generate(
            **inputs, max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True, cdb=cdb
        )
        return output, time.perf_counter() - begin

    ratios = []
    for _ in range(TURNS):
        off, full_time = generate(False)
        on, time_on = generate(True)
        ratios.append(full_time / time_on)
    exact, _ = generate({"exit_rule": "never"})

    settings = model.generation_config.cdb_config
    print(f"\ntiny-{name}: {on.stats.full_depth} loops, saved settings {settings}")
    length = inputs["input_ids"].shape[1]
    for row, text in enumerate(PROMPTS):
        print(f"\n  {text}")
        print(f"    off    {tokenizer.decode(off.sequences[row, length:], skip_special_tokens=True)!r}")
        written, depths = by_depth(tokenizer, on.sequences[row, length:], on.exit_depths[row], on.stats.full_depth)
        print(f"    on     {written}\n    depth  {depths}")
    print(f"\n  With exits off cdb gives stock generate's tokens: {torch.equal(exact.sequences, off.sequences)}")
    same, tokens = agreement(off, on, length)
    print(f"  Tokens equal to those of full depth up to the first that differs: {same} of {tokens}")
    report_depths(on)
    print(
        f"  Time of stock generate over that of cdb, median of {TURNS}: {statistics.median(ratios):.2f} "
        f"(FLOP bound {on.stats.flop_bound:.2f}; at this size of model Python, not arithmetic, takes the time)"
    )


def by_depth(
    tokenizer: PreTrainedTokenizerBase, tokens: torch.Tensor, depths: torch.Tensor, full_depth: int
) -> tuple[str, str]:
    """Text with every token in the colour of its depth, and a line of the depths beneath."""
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    text, marks = "", ""
    for token, depth in zip(tokens.tolist(), depths.tolist(), strict=True):
        if depth == 0:  # the row had ended
            break
        piece = "⏎" if token == tokenizer.eos_token_id else tokenizer.decode([token]).replace("\n", "¶")
        shade = COLOURS[round((len(COLOURS) - 1) * (depth - 1) / max(full_depth - 1, 1))]
        text += f"\033[38;5;{shade}m{piece}\033[0m" if colour else piece
        marks += str(depth).ljust(len(piece))
    return text, marks


def agreement(off: GenerateDecoderOnlyOutput, on: GenerateCDBOutput, length: int) -> tuple[int, int]:
    """Tokens before a row's first difference from full depth, and all tokens of full depth; rows added up."""
    width = min(off.sequences.shape[1], on.sequences.shape[1])
    equal = off.sequences[:, length:width] == on.sequences[:, length:width]
    until_difference = equal.cumprod(dim=1)
    asked = on.exit_depths[:, : width - length] > 0
    return int((until_difference * asked).sum()), int(asked.sum())


def report_depths(output: GenerateCDBOutput) -> None:
    stats = output.stats
    print(f"  Mean depth {stats.mean_depth:.2f} of {stats.full_depth}; tokens by depth:")
    for depth in range(1, stats.full_depth + 1):
        count = stats.depths[depth]
        print(f"    {depth}  {count:4d}  {'#' * round(60 * count / stats.tokens)}")


if __name__ == "__main__":
    main()
