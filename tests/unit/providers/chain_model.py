"""A language model of a few hundred kilobytes that says what it is told to, as a GGUF file of llama.cpp.

It is a llama of one layer whose attention and feed-forward weights are zero, and whose embedding of a token
is a one among zeros. So the next token depends on the last one only, and the output matrix says which it is.
The chat template ends a prompt with the token that begins the answer: of plain text, of text without an end,
or of a tool call.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

TEXT = "The tide comes in."
TOOL = "look"
ARGUMENTS = {"what": "x"}
ENDLESS = "on and on"
"""A user who says this gets an answer without an end."""

_END = "<|im_end|>"
_CHAINS = (
    ("<|text|>", "The", " tide", " comes", " in.", _END),
    ("<|endless|>", " on", " and", " on"),
    ("<|call|>", "<tool_call>\n", f'{{"name": "{TOOL}", ', '"arguments": {', '"what": ', '"x"}}',
     "\n</tool_call>", _END),
)  # fmt: skip
_TEMPLATE = """
{%- if tools %}
    {{- '<|im_start|>system\\nTools:\\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
    {{- 'Answer with <tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.content %}{{- message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if tools and messages[-1].role != 'tool' %}{{- '<|call|>' }}
    {%- elif 'on and on' in messages[-1].content %}{{- '<|endless|>' }}
    {%- else %}{{- '<|text|>' }}
    {%- endif %}
{%- endif %}
"""
_CONTEXT = 4096
_HEADS = 4
_HIDDEN = 8
_STRENGTH = 10.0
"""Weight of the one token that follows; all others have 0, so no temperature in use brings another."""
_NORMAL, _CONTROL = 1, 3
"""Types of tokens in the file."""


def write_chain_model(path: Path) -> None:
    """Write the model; takes the packages gguf and numpy."""
    import gguf
    import numpy as np

    marks = ["<|im_start|>", _END, *(chain[0] for chain in _CHAINS)]
    words = list(dict.fromkeys(word for chain in _CHAINS for word in chain if word not in marks))
    letters = _letters()
    tokens = [*letters, *("".join(letters[byte] for byte in word.encode()) for word in words), *marks]
    numbers = {word: len(letters) + number for number, word in enumerate([*words, *marks])}
    width = len(tokens) + -len(tokens) % (2 * _HEADS)

    file = gguf.GGUFWriter(path, "llama")
    file.add_context_length(_CONTEXT)
    file.add_vocab_size(len(tokens))
    file.add_embedding_length(width)
    file.add_block_count(1)
    file.add_feed_forward_length(_HIDDEN)
    file.add_head_count(_HEADS)
    file.add_head_count_kv(_HEADS)
    file.add_rope_dimension_count(width // _HEADS)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("gpt-2")
    file.add_token_list(tokens)
    file.add_token_types([_CONTROL if token in marks else _NORMAL for token in tokens])
    file.add_token_merges(["h e"])  # a list without any is refused
    file.add_bos_token_id(numbers[_END])
    file.add_eos_token_id(numbers[_END])
    file.add_add_bos_token(False)
    file.add_chat_template(_TEMPLATE)

    def zeros(*shape: int) -> np.ndarray:
        return np.zeros(shape, dtype=np.float32)

    following = zeros(len(tokens), width)
    for chain in _CHAINS:
        for word, after in pairwise(chain):
            following[numbers[after], numbers[word]] = _STRENGTH
    ones = np.ones(width, dtype=np.float32)
    file.add_tensor("token_embd.weight", np.eye(len(tokens), width, dtype=np.float32))
    file.add_tensor("output.weight", following)
    file.add_tensor("output_norm.weight", ones)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        file.add_tensor(f"blk.0.{name}.weight", zeros(width, width))
    for name, shape in (
        ("ffn_gate", (_HIDDEN, width)),
        ("ffn_up", (_HIDDEN, width)),
        ("ffn_down", (width, _HIDDEN)),
    ):
        file.add_tensor(f"blk.0.{name}.weight", zeros(*shape))
    for name in ("attn_norm", "ffn_norm"):
        file.add_tensor(f"blk.0.{name}.weight", ones)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def _letters() -> list[str]:
    """A letter for each byte, as byte-level tokenizers since GPT-2 have them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
