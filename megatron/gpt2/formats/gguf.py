"""Write GGUF files, which llama.cpp reads, with llama.cpp's own `gguf` package.

llama.cpp's GPT-2 computes GELU in its tanh form and has no padding rows. Names, types and keys are those that
llama.cpp's converter `convert_hf_to_gguf.py` writes: matrices have the requested type, vectors and position embeddings
are fp32.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from data_utils import Tokenizer
from data_utils.command_line import Log, missing_package, require
from data_utils.tokenizers.base import MODEL_FILE, SentencePieceTokenizer
from data_utils.tokenizers.gpt2 import END_OF_TEXT
from megatron.gpt2.checkpoint.interface import BaseCheckpoint, check_metadata
from megatron.gpt2.device import PRECISIONS
from megatron.gpt2.formats.nanogpt_and_dcp import export_kind, openai_name, to_openai
from megatron.gpt2.formats.native import check_tokenizer, new_folder
from megatron.gpt2.formats.openai_tokenizer import tokenizer_files
from megatron.gpt2.model.gpt2 import TIED_WEIGHT, model_partition_specs

GGUF_FILE = "model.gguf"
# {our name of a type: (name of GGMLQuantizationType, name of LlamaFileType)}
TYPES = {
    "fp32": ("F32", "ALL_F32"),
    "fp16": ("F16", "MOSTLY_F16"),
    "bf16": ("BF16", "MOSTLY_BF16"),
    "q8_0": ("Q8_0", "MOSTLY_Q8_0"),
}
SPACES = "  a  b "
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # llama.cpp's numbers for the types of tokens


def write_gguf(
    source: BaseCheckpoint,
    out: str | Path,
    *,
    dtype: str = "source",
    tokenizer: Tokenizer | None = None,
    log: Log = print,
) -> Path:
    """Write `source` as model.gguf into the new folder `out`, and return the folder. Only one tensor is in memory at a
    time.

    dtype: the type of matrices, one of TYPES, converted from the fp32 masters if there are any. "source" keeps the
        dtype of the weights.

    Raises ValueError, in one line, if llama.cpp cannot compute the model, if `out` exists, or if the
    tokenizer does not fit the model.
    """
    try:
        import gguf
    except ImportError as error:
        raise missing_package("--to gguf", error.name, "gguf") from None
    model = check_metadata(source)
    check_tokenizer(source, tokenizer)
    require(
        model.gelu == "tanh",
        f"{source.path}: its GELU is {model.gelu}, and llama.cpp's is tanh, so the logits would differ; "
        "--to huggingface keeps the GELU",
    )
    kind = export_kind(source, dtype)
    if dtype == "source":
        dtype = PRECISIONS[source.tensors[f"model.{TIED_WEIGHT}"].dtype]
    matrix_type, file_type = TYPES[dtype]
    types, specs = gguf.GGMLQuantizationType, model_partition_specs(model)
    names: Any = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, model.num_layers)

    def type_of(name: str) -> Any:
        shape = specs[name].global_shape
        if len(shape) == 1 or name.startswith("position_embeddings."):
            return types.F32
        # Q8_0 needs rows of whole blocks of 32 values.
        return types.F16 if matrix_type == "Q8_0" and shape[-1] % 32 else types[matrix_type]

    with new_folder(out) as folder:
        writer = gguf.GGUFWriter(folder / GGUF_FILE, "gpt2")
        writer.add_name(Path(out).name)
        writer.add_file_type(gguf.LlamaFileType[file_type])
        writer.add_block_count(model.num_layers)
        writer.add_context_length(model.max_position_embeddings)
        writer.add_embedding_length(model.hidden_size)
        writer.add_feed_forward_length(model.ffn_size)
        writer.add_head_count(model.num_attention_heads)
        writer.add_layer_norm_eps(model.layernorm_epsilon)
        if problem := _add_tokenizer(writer, tokenizer):
            log(f"WARNING: the file has no tokenizer: {problem}")
            writer.add_tokenizer_model("no_vocab")
            writer.add_vocab_size(source.metadata["vocab_size"])
        for name, spec in specs.items():
            gguf_name = names.get_name(f"transformer.{openai_name(name)}", try_suffixes=(".weight", ".bias"))
            size = math.prod(gguf.quant_shape_to_byte_shape(spec.global_shape, type_of(name)))
            writer.add_tensor_info(gguf_name, spec.global_shape, np.dtype("float32"), size, raw_dtype=type_of(name))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name in specs:
            x = source.read(f"{kind}.{name}").float()
            x = to_openai(x, name, model.num_attention_heads, transposed=False).contiguous()
            writer.write_tensor_data(gguf.quantize(x.numpy(), type_of(name)))
        writer.close()
    return Path(out)


def _add_tokenizer(writer: Any, tokenizer: Tokenizer | None) -> str:
    """Add the tokenizer to the file. Return "", or the reason why llama.cpp cannot use the tokenizer."""
    if tokenizer is None:
        return "the source has none"
    if isinstance(tokenizer, SentencePieceTokenizer):
        problem = _add_sentencepiece(writer, tokenizer)
    else:
        problem = _add_byte_pairs(writer, tokenizer)
    if not problem:
        writer.add_add_bos_token(False)
        writer.add_bos_token_id(tokenizer.eod)
        writer.add_eos_token_id(tokenizer.eod)
    return problem


def _add_byte_pairs(writer: Any, tokenizer: Tokenizer) -> str:
    files, problem = tokenizer_files(tokenizer, 0)
    if problem:
        return f"llama.cpp has no equal of {tokenizer.kind}"
    ids = json.loads(files["vocab.json"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(ids, key=ids.__getitem__))
    writer.add_token_types([CONTROL if number == tokenizer.eod else NORMAL for number in range(len(ids))])
    # llama.cpp refuses an empty list, which a tokenizer of bytes has. UTF-8 text does not contain the byte 0xff, which
    # ÿ stands for.
    writer.add_token_merges(files["merges.txt"].decode().splitlines()[1:] or ["ÿ ÿ"])
    return ""


def _add_sentencepiece(writer: Any, tokenizer: SentencePieceTokenizer) -> str:
    """Add a SentencePiece tokenizer. llama.cpp merges the pair with the highest score first, as SentencePiece's BPE
    does."""
    from sentencepiece import SentencePieceProcessor

    model = SentencePieceProcessor(model_proto=tokenizer.files[MODEL_FILE])
    numbers = range(model.vocab_size())
    types = [
        BYTE if model.is_byte(i) else CONTROL if model.is_control(i) else UNKNOWN if model.is_unknown(i) else NORMAL
        for i in numbers
    ]
    scores = [model.get_score(i) for i in numbers]
    if [score for score, kind in zip(scores, types, strict=True) if kind == NORMAL] != [
        -i for i in range(types.count(NORMAL))
    ]:
        return "it is not a BPE of SentencePiece"
    if model.decode(model.encode(SPACES)) != SPACES or model.encode(SPACES) == model.encode(SPACES.strip()):
        return "its SentencePiece model changes spaces"
    # The tokenizer may have one more id, for the end of a document, than its SentencePiece model.
    end = [END_OF_TEXT] * (tokenizer.vocab_size - len(numbers))
    writer.add_tokenizer_model("llama")
    writer.add_token_list([model.id_to_piece(i) for i in numbers] + end)
    writer.add_token_scores(scores + [0.0] * len(end))
    writer.add_token_types(types + [CONTROL] * len(end))
    writer.add_add_space_prefix(False)
    return ""
