"""Tiny random models with the form of real ones: what a study's smoke variant runs on, and tests that want a real tokenizer.

The architecture is the real one (Qwen3, Qwen2 with its biases and a head of its own, Llama) at a width of 64; the tokenizer is of
Qwen's kind: byte-level BPE, trained on a few lines, digits one by one, `<|im_start|>` and `<|im_end|>` around each turn, two
tokens that end a reply, `<think>` an ordinary token, and a chat template with `enable_thinking`. Weights are random, with one
change: all embeddings share a direction, and that of `<|im_end|>` goes further along it, so that a reply ends about every ten
tokens and not every 400.
"""

from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

KINDS = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}
END_OF_TEXT, START, END = SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = Regex(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+")
LINES = (
    "Let $x$ be a real number. Find the value of $x + 12$ if $3x = 27$.",
    "Please reason step by step, and put your final answer within \\boxed{}.",
    "We add the numbers and get the sum. The answer is \\boxed{42}.",
    "How many apples does she have in all? She has 3 + 4 = 7 apples.",
)
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
POSITIONS = 1024


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of some 400 tokens: it reads and writes any text."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(WORDS, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        LINES, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    inner.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    inner.add_tokens([AddedToken(token, special=False) for token in ("<think>", "</think>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[START, END],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def build(kind: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """A random model of one of `KINDS`, the same each time, float32."""
    config, architecture = KINDS[kind]
    torch.manual_seed(0)
    model = architecture(
        config(
            vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, intermediate_size=128, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, max_position_embeddings=POSITIONS, tie_word_embeddings=kind != "qwen2",
            use_cache=True,
            pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
        )
    )  # fmt: skip
    embeddings = model.get_input_embeddings().weight.data
    embeddings += 0.025
    embeddings[tokenizer.eos_token_id] += 0.07
    if not model.config.tie_word_embeddings:
        model.get_output_embeddings().weight.data.copy_(embeddings)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zeros, so far
            parameter.data.normal_(std=0.02)
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END_OF_TEXT)]
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)
    return model


def save(kind: str, folder: Path) -> Path:
    """Write a tiny checkpoint of one of `KINDS`."""
    tokenizer = build_tokenizer()
    build(kind, tokenizer).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
