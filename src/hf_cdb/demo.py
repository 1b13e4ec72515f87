"""`make demo`: several prompts, generated with cdb off and on.

The weights are random, so the text means nothing. What shows is the machinery: with exits off the text is stock
generate's to the letter; with exits on every token takes the loops it asks for, and the time follows.
"""

import statistics
import tempfile
import time

import torch
from transformers import AutoModelForCausalLM

from . import HuginnConfig, OuroConfig, OuroForCausalLM, RavenForCausalLM

PROMPTS = (
    "Once",
    "The loop runs again,",
    "Depth is a choice",
    "In a batch no row waits for another",
    "An easy token",
    "Twice around",
    "What was left early is not lost",
    "Slow and then fast",
)
NEW_TOKENS = 24
TURNS = 3


def main() -> None:
    torch.set_num_threads(1)
    show("Ouro: 4 loops, exits by its own gate at 0.6", random_ouro(), {"exit_threshold": 0.6})
    show("Huginn: 8 loops, exits when its state settles", random_huginn(), {"exit_threshold": 0.5})


def random_ouro() -> OuroForCausalLM:
    """Printable characters as tokens; weights large enough that gates and tokens vary."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6}
    return OuroForCausalLM(OuroConfig(vocab_size=95, initializer_range=0.1, **sizes))


def random_huginn() -> RavenForCausalLM:
    """As `random_ouro`, with the published initialisation."""
    torch.manual_seed(1)
    sizes = {"n_embd": 384, "n_heads": 6, "intermediate_size": 1024, "mean_recurrence": 8, "block_size": 256}
    return RavenForCausalLM(HuginnConfig(vocab_size=95, padding_multiple=1, **sizes))


def show(title: str, model, settings: dict) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
    longest = max(map(len, PROMPTS))
    ids = torch.stack([encode(text.rjust(longest)) for text in PROMPTS])
    mask = torch.stack([torch.arange(longest) >= longest - len(text) for text in PROMPTS]).long()

    def generate(cdb):
        begin = time.perf_counter()
        output = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            cdb=cdb,
        )
        return output, time.perf_counter() - begin

    ratios = []
    for _ in range(TURNS):
        off, full_time = generate(False)
        on, time_on = generate(settings)
        ratios.append(full_time / time_on)
    exact, _ = generate({"exit_rule": "never"})

    print(f"\n{title}")
    print(f"  cdb with exits off gives stock generate's tokens: {torch.equal(exact.sequences, off.sequences)}")
    for row, text in enumerate(PROMPTS):
        print(f"  {text}")
        print(f"    off     {decode(off.sequences[row, longest:])}")
        print(f"    on      {decode(on.sequences[row, longest:])}")
        print(f"    depths  {''.join(map(str, on.exit_depths[row].tolist()))}")
    stats = on.stats
    print(f"  mean depth {stats.mean_depth:.2f} of {stats.full_depth}; tokens by depth:")
    for depth in range(1, stats.full_depth + 1):
        count = stats.depths[depth]
        print(f"    {depth}  {count:4d}  {'#' * round(60 * count / stats.tokens)}")
    print(f"  speed over stock generate {statistics.median(ratios):.2f}, FLOP bound {stats.flop_bound:.2f}")


def encode(text: str) -> torch.Tensor:
    return torch.tensor([ord(letter) - 32 for letter in text])


def decode(tokens: torch.Tensor) -> str:
    return "".join(chr(32 + token) for token in tokens.tolist())


if __name__ == "__main__":
    main()
