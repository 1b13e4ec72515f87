"""`transformers serve --continuous-batching` takes a model whose generation config says cdb: what it calls, called."""

import asyncio

from transformers.cli.serving.utils import GenerationState, Modality

from hf_cdb.manager import CDBManager

from .server import load_ouro


def test_the_generation_state_of_transformers(reference, tokenizer):
    model = load_ouro()
    model.generation_config.cdb = True
    state = GenerationState(continuous_batching=True)
    assert state.use_continuous_batching(model, Modality.LLM)
    prompts = ["In the beginning", "sort:KDBHCA="]
    inputs = [tokenizer(prompt) for prompt in prompts]
    wanted = []
    for one in inputs:
        ids = tokenizer.pad([one], return_tensors="pt").input_ids
        output = reference.generate(ids, max_new_tokens=12, cdb=True)[0, ids.shape[1] :]
        wanted.append(tokenizer.decode(output, skip_special_tokens=True))

    async def serve():
        manager = state.get_manager("tiny-ouro", use_cb=True)
        model.generation_config.max_new_tokens = 12
        manager.init_cb(model, model.generation_config)
        assert isinstance(manager._cb, CDBManager)
        whole = asyncio.gather(
            *(manager.generate_non_streaming(model, tokenizer, one, model.generation_config, f"whole-{i}")
              for i, one in enumerate(inputs))
        )  # fmt: skip
        streams = [
            manager.generate_streaming(model, tokenizer, one, model.generation_config, f"stream-{i}")[0]
            for i, one in enumerate(inputs)
        ]
        texts = []
        for queue in streams:
            texts.append("")
            while (piece := await queue.get()) is not None:
                texts[-1] += piece
        return [text for text, _, _ in await whole], texts

    whole, streamed = asyncio.run(serve())
    assert whole == streamed == wanted
    assert state.is_cb_alive()
    state.shutdown()
