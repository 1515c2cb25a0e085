"""convert_gguf: the folder it writes means the same model, and damaged files are refused."""

import json
import time

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quant
from safetensors.numpy import load_file

from d3d_jax.errors import D3DError
from d3d_jax.models import gguf as gguf_module
from d3d_jax.models.gguf import convert_gguf
from tests.models import tiny_gguf as tiny
from tests.models.tiny_gguf import METADATA, write_tiny_gguf

FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    top = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    parts = name.removesuffix(".weight").split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight"
    return f"{top[parts[0]]}.weight"


def halves_from_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row by row: rows 2i and 2i + 1 of a head in the file are its rows i and i + half."""
    out = np.empty_like(weight)
    size = weight.shape[0] // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + i] = weight[head * size + 2 * i]
            out[head * size + size // 2 + i] = weight[head * size + 2 * i + 1]
    return out


def expected(meaning: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    heads = {"attn_q": tiny.HEADS, "attn_k": tiny.KV_HEADS}
    out = {}
    for name, tensor in meaning.items():
        kind = name.split(".")[-2]
        out[hf_name(name)] = halves_from_pairs(tensor, heads[kind]) if kind in heads else tensor
    return out


def assert_refused(tmp_path, match):
    """Converting tmp_path/m.gguf fails in one sentence and leaves nothing behind."""
    with pytest.raises(D3DError, match=match) as error:
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert "\n" not in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] in ([], ["m.gguf"])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("quant", [Quant.F32, Quant.F16, Quant.Q8_0, Quant.Q4_1])
def test_every_tensor_is_dequantised_and_renamed(tmp_path, quant, tied):
    meaning = write_tiny_gguf(tmp_path / "m.gguf", quant=quant, tied=tied)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    got, want = load_file(tmp_path / "out" / "model.safetensors"), expected(meaning)
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == np.float32
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


def test_attention_scores_are_those_of_the_interleaved_rotary(tmp_path):
    """GGUF rotates rows (2i, 2i+1) of a head, Hugging Face rows (i, i+half): same scores."""
    meaning = write_tiny_gguf(tmp_path / "m.gguf")
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    hf = load_file(tmp_path / "out" / "model.safetensors")
    rng, half = np.random.default_rng(1), tiny.HEAD_DIM // 2
    x, y = rng.normal(size=(2, tiny.HIDDEN))
    angles = METADATA["llama.rope.freq_base"] ** (-np.arange(half) / half)

    def rotate(rows, position, first, second):
        turned = (rows[:, first] + 1j * rows[:, second]) * np.exp(1j * position * angles)
        return np.concatenate([turned.real, turned.imag], axis=1)

    def scores(q, k, first, second):
        q = rotate((q @ x).reshape(tiny.HEADS, -1), 7, first, second)
        k = rotate((k @ y).reshape(tiny.KV_HEADS, -1), 3, first, second)
        return np.einsum("nh,nh->n", q, np.repeat(k, tiny.HEADS // tiny.KV_HEADS, axis=0))

    of_file = scores(
        meaning["blk.1.attn_q.weight"],
        meaning["blk.1.attn_k.weight"],
        slice(0, None, 2),
        slice(1, None, 2),
    )
    prefix = "model.layers.1.self_attn."
    q, k = hf[f"{prefix}q_proj.weight"], hf[f"{prefix}k_proj.weight"]
    of_folder = scores(q, k, slice(0, half), slice(half, None))
    np.testing.assert_allclose(of_folder, of_file, rtol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_config_states_what_the_file_states(tmp_path, tied):
    write_tiny_gguf(tmp_path / "m.gguf", tied=tied)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert {p.name for p in (tmp_path / "out").iterdir()} == FILES
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tiny.TOKENS),
        "hidden_size": tiny.HIDDEN,
        "intermediate_size": tiny.FEED_FORWARD,
        "num_hidden_layers": tiny.LAYERS,
        "num_attention_heads": tiny.HEADS,
        "num_key_value_heads": tiny.KV_HEADS,
        "head_dim": tiny.HEAD_DIM,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": 1e-05,  # not the float32's 9.999999747378752e-06
        "rope_theta": 5000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "torch_dtype": "float32",
    }
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_the_folder(tmp_path, tied):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    meaning = write_tiny_gguf(tmp_path / "m.gguf", tied=tied)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")

    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(loaded).__name__ == "LlamaForCausalLM" and loaded.dtype == torch.float32
    config = transformers.LlamaConfig(
        vocab_size=len(tiny.TOKENS),
        hidden_size=tiny.HIDDEN,
        intermediate_size=tiny.FEED_FORWARD,
        num_hidden_layers=tiny.LAYERS,
        num_attention_heads=tiny.HEADS,
        num_key_value_heads=tiny.KV_HEADS,
        head_dim=tiny.HEAD_DIM,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=tied,
    )
    built = transformers.LlamaForCausalLM(config).eval()
    state = {name: torch.tensor(weight) for name, weight in expected(meaning).items()}
    built.load_state_dict(state, strict=not tied)
    ids = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, built(ids).logits, rtol=0, atol=0)

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    ids = tokenizer("The then 123<|im_end|>é").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == (
        ["T", "he", "Ġthe", "n", "Ġ", "1", "2", "3", "<|im_end|>", "Ã©"]
    )
    assert tokenizer.decode(ids) == "The then 123<|im_end|>é"


@pytest.mark.parametrize(
    "key",
    [
        k
        for k in METADATA
        if k.split(".")[-1] not in ("add_bos_token", "padding_token_id", "unknown_token_id")
    ],
)
def test_a_missing_metadata_key_is_named(tmp_path, key):
    write_tiny_gguf(tmp_path / "m.gguf", metadata={k: v for k, v in METADATA.items() if k != key})
    assert_refused(tmp_path, f"lacks the metadata key {key}")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "scales its rotary"),
        ({"llama.rope.dimension_count": 8}, "tensor blk.0.attn_q.weight has shape"),
        ({"llama.attention.key_length": 32}, "not a whole head"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.attention.head_count_kv": 0}, "head_count_kv is 0"),
        ({"llama.block_count": 1}, "no llama has .blk.1"),
        ({"llama.block_count": 3}, "lacks the tensors blk.2"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, "only .gpt2, smollm. is known"),
        ({"tokenizer.ggml.add_bos_token": True}, "before every text"),
        ({"tokenizer.ggml.token_type": [1, 2, 3]}, "vocabulary is damaged"),
        ({"tokenizer.ggml.token_type": [6] * len(tiny.TOKENS)}, r"unknown types \[6\]"),
        ({"tokenizer.ggml.merges": ["no such"]}, "merges do not fit"),
        ({"tokenizer.ggml.merges": ["he"]}, "not a pair"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "eos_token 9999 lies outside"),
    ],
)
def test_metadata_it_cannot_honour_are_refused(tmp_path, change, match):
    write_tiny_gguf(tmp_path / "m.gguf", metadata=METADATA | change)
    assert_refused(tmp_path, match)


def test_another_architecture_is_refused(tmp_path):
    write_tiny_gguf(tmp_path / "m.gguf", architecture="qwen3")
    assert_refused(tmp_path, "architecture is 'qwen3'")


def test_tensors_out_of_place_are_refused(tmp_path):
    bias = np.zeros(64, np.float32)
    write_tiny_gguf(tmp_path / "m.gguf", extra={"blk.0.attn_q.bias": bias})
    assert_refused(tmp_path, "no llama has .blk.0.attn_q.bias")
    write_tiny_gguf(tmp_path / "m.gguf", drop=["blk.1.ffn_up.weight"])
    assert_refused(tmp_path, "lacks the tensors blk.1.ffn_up.weight")
    write_tiny_gguf(tmp_path / "m.gguf", extra={"output_norm.weight": np.ones(32, np.float32)})
    assert_refused(tmp_path, "output_norm.weight has shape")


def test_nan_weights_are_refused(tmp_path):
    norm = np.full(tiny.HIDDEN, np.nan, np.float32)
    write_tiny_gguf(tmp_path / "m.gguf", extra={"output_norm.weight": norm})
    assert_refused(tmp_path, "output_norm.weight holds NaN")


@pytest.mark.parametrize("fraction", [0, 0.0001, 0.01, 0.05, 0.1, 0.5, 0.9, 0.9999])
def test_a_truncated_file_is_refused(tmp_path, fraction):
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, tied=False)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * fraction)])
    assert_refused(tmp_path, "not a complete GGUF file")


def test_a_damaged_length_neither_hangs_nor_fills_memory(tmp_path):
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path)
    data = bytearray(path.read_bytes())
    at = data.index(b"tokenizer.ggml.token_type") + len("tokenizer.ggml.token_type") + 8
    data[at : at + 8] = (1 << 60).to_bytes(8, "little")
    path.write_bytes(data)
    start = time.monotonic()
    assert_refused(tmp_path, "not a complete GGUF file")
    assert time.monotonic() - start < 30


def test_what_is_no_gguf_file_is_refused(tmp_path):
    assert_refused(tmp_path, "there is no GGUF file")
    (tmp_path / "m.gguf").write_text("<html>not found</html>")
    assert_refused(tmp_path, "not a complete GGUF file")


def test_a_folder_in_use_is_kept(tmp_path):
    write_tiny_gguf(tmp_path / "m.gguf")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").write_text("mine")
    with pytest.raises(D3DError, match="already exists"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert (tmp_path / "out" / "notes").read_text() == "mine"


def test_an_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch):
    write_tiny_gguf(tmp_path / "m.gguf")

    def interrupted(tensors, path, **_):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_module, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
