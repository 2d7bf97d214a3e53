"""Micro models: the Qwen3 architecture at four sizes, with a tokenizer of single characters.

Same blocks as the papers' models (grouped-query attention, RMSNorm on queries and keys, SwiGLU, tied embeddings), so whatever is
done to a micro model is done to Qwen3-8B by the same code. Digits are single tokens, most significant first. `<think>`,
`</think>` and `\\boxed{` are one token each and ordinary ones: trainers decode replies without special tokens, and a reward
that never sees a box is always zero.
"""

import string

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SIZES = {  # hidden width, layers; parameters without rounding: 0.15 M, 0.79 M, 3.2 M, 12.4 M
    "xs": (64, 3),
    "s": (128, 4),
    "m": (256, 4),
    "l": (384, 7),
}
MAX_POSITIONS = 256
PAD, EOS, UNKNOWN, USER, ASSISTANT = SPECIAL = ("<pad>", "<eos>", "<unk>", "<user>", "<assistant>")
MARKS = ("<think>", "</think>", "\\boxed{")
CHARACTERS = string.digits + string.ascii_lowercase + "+-*/()=,;:?>.}{ "
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '<user>' + m['content'] }}"
    "{% elif m['role'] == 'assistant' %}{{ '<assistant>' + m['content'] + '<eos>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A character tokenizer with `decode(encode(text)) == text` over the known characters; others become `<unk>`."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *MARKS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"</?think>|\\boxed\{|[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()  # the default would join the characters with spaces
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def build(size: str, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A micro model with fresh random float32 weights; seed PyTorch first."""
    hidden, layers = SIZES[size]
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=3 * hidden,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        use_cache=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)
