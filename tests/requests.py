"""What the tests of the manager share: runs alone to compare with, and models that stand still or fail on request."""

import threading
from contextlib import contextmanager

import torch

PATIENCE = 20  # seconds until a test gives up; nothing waits so long where all is well
GATE = {"exit_threshold": 0.6}


def alone(model, prompt, cdb=GATE, **options):
    """Tokens and depths of every return sequence that `generate` gives for one prompt."""
    settings = {"max_num_seqs": 1, **cdb}
    ids = torch.as_tensor(prompt)[None]
    output = model.generate(ids, cdb=settings, return_dict_in_generate=True, **options)
    found = []
    for tokens, depths in zip(output.sequences[:, ids.shape[1] :], output.exit_depths, strict=True):
        length = int((depths > 0).sum())
        found.append((tokens[:length].tolist(), depths[:length].tolist()))
    return found


def told(output):
    """Tokens and depths of an output, which must have come and be a last one without an error."""
    assert output is not None, "no output came"
    assert output.error is None, output.error
    assert output.is_finished()
    return output.generated_tokens, output.exit_depths


def last(manager, name):
    """The last output of a request."""
    output = manager.get_result(name, timeout=PATIENCE)
    while output is not None and not output.is_finished():
        output = manager.get_result(name, timeout=PATIENCE)
    assert output is not None, f"{name} never ended"
    return output


def held_memory(manager):
    """Whatever a manager holds of requests, by name; all zero when there are none."""
    worker, engine = manager._worker, manager._engine
    return {
        "keys and values": engine.cache.core_bytes + engine.cache.outer_bytes,
        "scheduled": len(engine.scheduler),
        "in the engine": len(engine._requests) + len(engine._ended),
        "jobs": len(worker._jobs) + len(worker._rows) + len(worker._new) + len(worker._ending),
        "outputs": len(manager._outbox) + len(manager._outbox._coming),
        "handlers": len(manager._outbox._handlers),
        "pauses": len(worker._pauses),
    }


def assert_clean(manager):
    assert not any(held_memory(manager).values()), held_memory(manager)


class Held:
    """The manager's thread stands still in a launch of `stage`, the one after `skip` others, until it is let go."""

    def __init__(self, manager, stage, skip=0):
        self.entered, self.go = threading.Event(), threading.Event()
        self._skip, self._plain = skip, getattr(manager._engine.adapter, stage)
        setattr(manager._engine.adapter, stage, self._wait)

    def _wait(self, *args, **kwargs):
        if self._skip:
            self._skip -= 1
        elif not self.go.is_set():
            self.entered.set()
            assert self.go.wait(PATIENCE)
        return self._plain(*args, **kwargs)

    def wait(self):
        """Until it stands still."""
        assert self.entered.wait(PATIENCE)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.go.set()


@contextmanager
def failing(manager, stage, error, skip=0):
    """While open, `stage` of the model raises, after `skip` calls that do not."""
    adapter, left = manager._engine.adapter, [skip]
    plain = getattr(adapter, stage)

    def fail(*args, **kwargs):
        left[0] -= 1
        if left[0] < 0:
            raise error
        return plain(*args, **kwargs)

    setattr(adapter, stage, fail)
    yield
    setattr(adapter, stage, plain)
