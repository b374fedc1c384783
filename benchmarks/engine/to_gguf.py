"""Write the weights of a Llama model of transformers as a GGUF file in q8_0, for llama.cpp.

    python to_gguf.py FOLDER FILE

Matrices are in q8_0: blocks of 32 integers of 8 bits with one scale of 16 bits. Norms are float32.
The file has no tokenizer, because prompts and answers are token ids. The environment needs `gguf`
and `safetensors`; this module is run in that of the peer.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
REST = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def renamed(name: str) -> str:
    """The name in GGUF of a parameter of transformers."""
    name = name.removesuffix(".weight")
    if name in REST:
        return f"{REST[name]}.weight"
    number, _, part = name.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{LAYER[part]}.weight"


def interleaved(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """A query or key matrix, (heads * width, hidden), with its rotary pairs side by side.

    transformers rotates row i of a head with row i + width / 2, and llama.cpp row 2 i with 2 i + 1.
    """
    rows, hidden = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, hidden)
    return halves.swapaxes(1, 2).reshape(rows, hidden)


def write(folder: Path, file: Path) -> None:
    import gguf
    from safetensors.numpy import load_file

    facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if facts["model_type"] != "llama" or facts["rope_parameters"]["rope_type"] != "default":
        raise ValueError(f"{folder} is no Llama model with plain rotary embeddings")
    heads, kv_heads = facts["num_attention_heads"], facts["num_key_value_heads"]
    out = gguf.GGUFWriter(file, "llama")
    out.add_vocab_size(facts["vocab_size"])
    out.add_context_length(facts["max_position_embeddings"])
    out.add_embedding_length(facts["hidden_size"])
    out.add_block_count(facts["num_hidden_layers"])
    out.add_feed_forward_length(facts["intermediate_size"])
    out.add_rope_dimension_count(facts["head_dim"])
    out.add_rope_freq_base(facts["rope_parameters"]["rope_theta"])
    out.add_head_count(heads)
    out.add_head_count_kv(kv_heads)
    out.add_layer_norm_rms_eps(facts["rms_norm_eps"])
    out.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    out.add_tokenizer_model("none")
    q8_0, turned = gguf.GGMLQuantizationType.Q8_0, {"q_proj": heads, "k_proj": kv_heads}
    for name, read in load_file(folder / "model.safetensors").items():
        weight = read.astype(np.float32)
        if (part := name.split(".")[-2]) in turned:
            weight = interleaved(weight, turned[part])
        if weight.ndim == 1:
            out.add_tensor(renamed(name), weight)
        else:
            out.add_tensor(renamed(name), gguf.quants.quantize(weight, q8_0), raw_dtype=q8_0)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
