"""Folders ready for the Hugging Face Hub: weights, a model card, and code for those who do not import the package.

from huggingface_hub import upload_folder
from hf_cdb.hub import export

export(model, "my-looped-model", tokenizer=tokenizer, license="apache-2.0", base_model="ByteDance/Ouro-1.4B")
upload_folder(repo_id="me/my-looped-model", folder_path="my-looped-model")
"""

from .card import model_card
from .export import export

__all__ = ["export", "model_card"]
