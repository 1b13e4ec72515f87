"""The model card of a looped model."""

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from torch import nn

from ..adapters import adapter_for
from ..bench.report import model_sizes
from ..config import CDBConfig, saved_settings
from ..evaluation.report import to_markdown
from .results import check_model, depth_histogram, eval_results, load_results
from .text import CardText, read_text

__all__ = ["model_card", "origin"]

_TEMPLATE = Path(__file__).parent / "templates" / "card.md"
_TAGS = ("looped-language-model", "adaptive-depth", "hf_cdb")


def model_card(
    model: nn.Module,
    name: str,
    *,
    repo_id: str | None = None,
    text: str | None = None,
    results: Mapping[str, Any] | str | Path | None = None,
    depths: Mapping[int, int] | None = None,
    plot: str | None = None,
    tokenizer: bool = True,
    base_model: str | Sequence[str] | None = None,
    language: str | Sequence[str] | None = None,
    license: str | None = None,
    tags: Sequence[str] = (),
) -> ModelCard:
    """A card with metadata, usage, what was measured, and limits.

    Args:
        model: a looped model with an adapter; its sizes and what its generation config says of cdb are told.
        name: title, and name of the model in the metadata; one line.
        repo_id: what to load it by in the usage; default the name.
        text: Markdown of your own, see `hf_cdb.hub.text.read_text`: a YAML block adds metadata, what comes before the
            first `##` is the description, and sections stand after the usage. A section "Usage" takes the place of the
            written one, and "Limits" comes before the general limits. `tables(...)` reads from the folder that the
            model was loaded from.
        results: `results.json` of an evaluation, or its path: tables, depths and `model-index`.
        depths: loop -> tokens, as `output.stats.depths`, in place of those of the results' system "default".
        plot: name of a picture in the folder of the card.
        tokenizer: whether one is saved with the model; without, the usage starts from token ids.
        base_model, language, license, tags: metadata; tags come after those of hf_cdb.

    Raises:
        ValueError: a model without an adapter, a name of several lines, results of another kind or of a model of other
            sizes, or a text that cannot be read.

    Warns:
        UserWarning: results of a model of another name. The card says which one was measured.
    """
    for key, value in (("name", name), ("repo_id", repo_id)):
        if value is not None and (not value.strip() or not value.isprintable()):
            raise ValueError(f"{key}={value!r}: choose a line of text that can be printed.")
    adapter = adapter_for(model)
    source = getattr(model, "name_or_path", None)
    written = CardText() if text is None else read_text(text, source if source and Path(source).is_dir() else None)
    sections, sizes = dict(written.sections), model_sizes(model)
    metadata = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        **written.metadata,
        "tags": [*dict.fromkeys([*_TAGS, *_listed(written.metadata.get("tags", ())), *_listed(tags)])],
    }
    given = {"base_model": base_model, "language": language, "license": license}
    metadata |= {key: value if isinstance(value, str) else list(value) for key, value in given.items() if value}
    counted = "Generated tokens"
    if results is not None:
        results = load_results(results)
        check_model(results, sizes)
        measured = results["model"].get("name")
        if source and measured and Path(source).name != Path(measured).name:
            warnings.warn(
                f"results are of the model {measured!r}, and this one was loaded from {source!r}.", stacklevel=2
            )
        metadata |= {"model_name": name, "eval_results": eval_results(results)}
        if depths is None:
            default = next((system for system in results["systems"] if system["name"] == "default"), {})
            depths, counted = default.get("depths"), "All tokens that the evaluation generated, read or scored"
    settings = saved_settings(model.generation_config, adapter)
    return ModelCard.from_template(
        ModelCardData(**metadata),
        template_path=str(_TEMPLATE),
        title=written.title or name,
        description=written.description or _description(sizes),
        usage=sections.pop("Usage", None),
        limits=sections.pop("Limits", None),
        sections=sections,
        path=json.dumps(repo_id or name, ensure_ascii=False),  # a literal of Python, too
        tokenizer=tokenizer,
        measured=None if results is None else results["model"].get("name"),
        known=origin(model),
        settings=None if settings is None else json.dumps(CDBConfig.plain(settings)),
        threshold=adapter.default_threshold,
        calibrated=getattr(model.generation_config, "cdb_calibrated", None) or (),
        results=None if results is None else to_markdown(results).strip(),
        histogram=None if depths is None else depth_histogram(depths, sizes["loops"]),
        counted=counted,
        plot=plot,
        **{"class": sizes["class"]},
    )


def origin(model: nn.Module) -> str:
    """Top-level package that defines the model's class, such as "hf_cdb" or "transformers"."""
    return type(model).__module__.partition(".")[0]


def _listed(tags: str | Sequence[str]) -> Sequence[str]:
    return [tags] if isinstance(tags, str) else tags


def _description(sizes: Mapping[str, Any]) -> str:
    return (
        f"A looped language model, `{sizes['class']}`: {sizes['loops']} loops over "
        f"{sizes['parameters_per_loop']:,} of its {sizes['parameters']:,} parameters ({sizes['dtype']}). With hf_cdb "
        "every token leaves after as many loops as it needs, and rows at different depths share a batch (continuous "
        "depth batching, arXiv 2608.09444)."
    )
