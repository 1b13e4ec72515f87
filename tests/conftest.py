import os

# Before torch is imported: two test processes with two spinning threads each would slow each other down.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import pytest
import torch
import transformers

from .tiny import RANDOM

torch.set_num_threads(1)
# The same cases in every run: a failure of the tests is a failure of the change.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _same_threads():
    # Commands set what they are asked for.
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _forget_warnings_shown_once():
    # warning_once would otherwise show a warning to the first test of a process only.
    transformers.utils.logging.warning_once.cache_clear()


@pytest.fixture(params=RANDOM)
def model(request):
    """Each family with random weights in float64, without tokens that begin or end a sequence."""
    return RANDOM[request.param](eos_token_id=None, bos_token_id=None, pad_token_id=0).double()


@pytest.fixture
def ouro():
    return RANDOM["ouro"](eos_token_id=None, bos_token_id=None, pad_token_id=0).double()


@pytest.fixture
def engines(monkeypatch):
    """Every engine that is made."""
    from hf_cdb.engine import Engine

    made = []
    create = Engine.__init__

    def record(self, *args, **kwargs):
        create(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(Engine, "__init__", record)
    return made
