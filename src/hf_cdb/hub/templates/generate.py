"""`generate` with continuous depth batching for callers that do not import `hf_cdb`. Made by hf_cdb.hub.export."""

import copy

import hf_cdb


def generate(model, *args, cdb=None, custom_generate=None, trust_remote_code=None, **kwargs):
    """As `model.generate` of hf_cdb.

    A model whose class does not know cdb must not be generated with in several threads at a time.

    Args:
        model: a looped model that hf_cdb has an adapter for.
        cdb: as there; None is what the model's generation config says, and True for a model whose own `generate` does
            not know cdb: nobody would come here for that one.
        custom_generate, trust_remote_code: what led here, where the model was loaded together with this file.
        *args, **kwargs: of `generate`.
    """
    if not isinstance(model, hf_cdb.CDBGenerationMixin):
        # A copy that shares all weights, so that the caller's model keeps its class.
        model = hf_cdb.enable_cdb(copy.copy(model))
        cdb = True if cdb is None else cdb
    return type(model).generate(model, *args, cdb=cdb, **kwargs)
