"""`d3d init-drafter`: an untrained drafter from layers of a pretrained model."""

from __future__ import annotations

from pathlib import Path

from d3d_jax.commands.options import InitDrafter
from d3d_jax.commands.runtime import note
from d3d_jax.config import DrafterConfig, ModelConfig
from d3d_jax.drafter import Drafter, init_drafter, save_drafter
from d3d_jax.errors import D3DError
from d3d_jax.infer.loading import model_name
from d3d_jax.models import checkpoint
from d3d_jax.models.registry import resolve_model
from d3d_jax.models.tokenizer import Tokenizer
from d3d_jax.train.dataset import open_dataset
from d3d_jax.train.vocabulary import frequent_tokens


def run(options: InitDrafter) -> None:
    """Checks that source and target fit together, and writes the drafter's folder."""
    if options.out.exists():
        raise D3DError(f"{options.out} exists already; remove it or choose another folder")
    source, target = resolve_model(options.source), resolve_model(options.target)
    tokenizer, model = Tokenizer.from_folder(target), checkpoint.read_config(source)[0]
    if Tokenizer.from_folder(source).fingerprint != tokenizer.fingerprint:
        raise D3DError(
            f"{options.source} and {options.target} have different tokenizers; a drafter needs "
            "its target's"
        )
    shared = source.samefile(target)
    draft_vocab = None
    if options.draft_vocab_size is not None and options.vocab_from is not None:
        if not shared:
            raise D3DError(
                "--draft-vocab-size selects rows of the target's own head, so --from and --target "
                "must be the same model"
            )
        dataset = open_dataset(options.vocab_from, "train")
        if dataset.manifest.tokenizer_fingerprint != tokenizer.fingerprint:
            raise D3DError(f"{options.vocab_from} holds token ids of another tokenizer")
        draft_vocab = frequent_tokens(dataset, model.vocab_size, options.draft_vocab_size)
    config = DrafterConfig(
        block_size=options.block_size,
        mask_token_id=_mask_token_id(options.mask_token_id, tokenizer, model),
        label_shift=options.label_shift,
        in_block=options.in_block,
        target=model_name(options.target),
        tokenizer_fingerprint=tokenizer.fingerprint,
        template_fingerprint=tokenizer.template_fingerprint,
        source_layers=_source_layers(options, model.num_hidden_layers),
        shares=("embed", "head") if shared else (),
        draft_vocab_size=options.draft_vocab_size,
    )
    drafter, params = init_drafter(source, config, draft_vocab, options.random_layers or 0)
    save_drafter(options.out, drafter, params)
    _announce(options.out, drafter)


def _announce(out: Path, drafter: Drafter) -> None:
    config = drafter.drafter
    layers = "layers " + " ".join(str(layer) for layer in config.source_layers)
    if not config.source_layers:
        layers = f"{drafter.model.num_hidden_layers} random layers"
    sharing = "sharing the target's embedding" if config.shares else "with its own embedding"
    note(
        f"{out}: {layers}, block size {config.block_size}, mask {config.mask_token_id}, "
        f"{sharing}; not trained yet"
    )


def _source_layers(options: InitDrafter, count: int) -> tuple[int, ...]:
    """Those asked for, or the first three and the last two: what reads tokens, what speaks them."""
    if options.random_layers is not None:
        return ()
    if options.layers is not None:
        return options.layers
    return tuple(sorted({*range(min(3, count)), *range(max(count - 2, 0), count)}))


def _mask_token_id(asked: int | None, tokenizer: Tokenizer, model: ModelConfig) -> int:
    """The id asked for, or one that no text and no reply needs.

    Raises:
      D3DError: none was asked for and there is no such id.
    """
    if asked is not None:
        return asked
    if tokenizer.vocab_size < model.vocab_size:
        return tokenizer.vocab_size
    if free := tokenizer.special_ids - set(tokenizer.stop_ids):
        return max(free)
    raise D3DError("the tokenizer has no id to spare for the mask: name one with --mask-token-id")
