"""The tokenizer that several tests share; training it takes a second."""

from functools import cache

from hf_cdb.training.tokenizer import train_tokenizer


@cache
def tokenizer():
    return train_tokenizer()
