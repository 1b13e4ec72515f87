"""A small byte-level tokenizer for the training text and the tasks."""

import random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from .tasks import TASKS
from .text import chapters

__all__ = ["BOS", "CHAT_TEMPLATE", "EOS", "PAD", "train_tokenizer"]

PAD, BOS, EOS = SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")

# A word is what follows a space, or a letter and the small letters after it; digits and signs stand alone. Tasks have
# no spaces, so their capitals are never merged, while prose keeps words like " LORD" whole.
_PIECES = r" \p{L}+|\p{L}\p{Ll}*|[^\p{L}]"

# A turn and its answer look like one line of the training data, and so does the opening of every further turn.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ bos_token + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('role ' + message['role'] + ' is unknown: use user and assistant') }}"
    "{% endif %}{% endfor %}"
)


def train_tokenizer(vocab_size: int = 512, *, lines_per_task: int = 5000) -> PreTrainedTokenizerFast:
    """Byte-pair encoding trained on the training chapters and on lines of every task; the same in every run.

    All 256 bytes are tokens, so every text is encoded without loss. Encoding puts `<bos>` first; an answer's `<eos>`
    is the caller's. Where a prompt ends in a sign, such as "=", the tokens of prompt and answer together are those of
    the prompt followed by those of the answer.

    Args:
        vocab_size: entries: three special tokens (ids 0 to 2: `<pad>`, `<bos>`, `<eos>`), 256 bytes, merges.
        lines_per_task: random lines of each task in the corpus; enough of them make the tasks' names short.

    Raises:
        ValueError: a vocabulary without room for the bytes.
    """
    least = len(SPECIAL_TOKENS) + 256
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < least:
        raise ValueError(f"vocab_size={vocab_size!r}: {least} entries are special tokens and bytes. Choose more.")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = random.Random("tokenizer")
    lines = []
    for task in TASKS.values():
        drawn = (task.draw(rng) for _ in range(lines_per_task))
        lines += [example.prompt + example.answer for example in drawn]
    backend.train_from_iterator(chapters("train") + lines, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, backend.token_to_id(BOS))],
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
