"""Makes a tiny random Llama with a tokenizer in a folder: ``tiny_model.py FOLDER [SCALE]``.

With a SCALE above 1 it is so much wider and has so many layers more: slower, so that reading a
prompt takes longer than everything around it.

Runs with the Python that has vLLM, which brings transformers and torch. The weights come from a
fixed seed, so that two servers answer the same prompt alike.
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 512
POSITIONS = 8192
END = "<|end|>"
SENTENCES = (
    "The gate keeper counts the queues of the river and sends each boat to the shortest one.",
    "A tail race carries the water away from the wheel, and the wheel turns on.",
    "Requests wait, batches run, tokens stream; what was read before is read from memory.",
    "user: how long is the queue? assistant: it holds seven requests and the oldest is young.",
)
#: Every message ends alike, so a conversation's earlier turns are a prefix of its later ones.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on a few sentences."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, model_max_length=POSITIONS
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return fast


def save_model(folder: Path, end: int, scale: int) -> None:
    """Save two layers of random weights, about 0.4 million, or more of a larger scale."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128 * scale,
        intermediate_size=256 * scale,
        num_hidden_layers=2 * scale,
        num_attention_heads=4 * scale,
        num_key_value_heads=2 * scale,
        max_position_embeddings=POSITIONS,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    end_id = save_tokenizer(target).eos_token_id
    assert isinstance(end_id, int)
    save_model(target, end_id, int(sys.argv[2]) if len(sys.argv) > 2 else 1)
