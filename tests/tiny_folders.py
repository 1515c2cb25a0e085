"""Tiny random models as folders on disk, with a tokenizer and chat template, for whole commands."""

from pathlib import Path

import jax
import numpy as np

from d3d_jax.models import checkpoint, checkpoint_writing
from d3d_jax.models.gguf import convert_gguf
from d3d_jax.models.tokenizer import Tokenizer
from tests.models.tiny_gguf import CHAT_TEMPLATE, METADATA, TOKENS, write_tiny_gguf
from tests.tiny_models import tiny_config, tiny_drafter, tiny_params

BLOCK_SIZE = 4
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def write_tokenizer(folder: Path, template: str = CHAT_TEMPLATE) -> dict[str, bytes]:
    """The tokenizer files of the tiny GGUF model by name; `folder` is scratch space."""
    folder.mkdir()
    write_tiny_gguf(folder / "tiny.gguf", metadata=METADATA | {"tokenizer.chat_template": template})
    convert_gguf(folder / "tiny.gguf", folder / "model")
    return {name: (folder / "model" / name).read_bytes() for name in _TOKENIZER_FILES}


def write_target(folder: Path, seed: int = 0, template: str = CHAT_TEMPLATE) -> Path:
    """A Qwen3 folder of two layers whose last four embedding rows no token uses."""
    config = tiny_config(vocab_size=len(TOKENS) + 4, num_hidden_layers=2)
    files = write_tokenizer(folder.with_name(f"{folder.name}-tokenizer"), template)
    params = jax.tree.map(np.asarray, tiny_params(config, seed))
    checkpoint_writing.save_model(folder, config, params, extra_files=dict(files))
    return folder


def write_drafter(folder: Path, source: Path, layers: tuple[int, ...] = (1,), **changes) -> Path:
    """A drafter of layers of a `write_target` folder, the last one alone, sharing its embedding."""
    config, _ = checkpoint.read_config(source)
    params = checkpoint.load_params(source, config, stacked=True)
    tokenizer = Tokenizer.from_folder(source)
    fields = {
        "block_size": BLOCK_SIZE,
        "target": source.name,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "template_fingerprint": tokenizer.template_fingerprint,
    }
    drafter, own = tiny_drafter(config, params, layers=layers, **(fields | changes))
    own = {name: leaf for name, leaf in own.items() if name not in ("embed", "head")}
    checkpoint_writing.save_model(folder, drafter.model, own, drafter=drafter.drafter)
    return folder
