"""Small checkpoints with tokenizers of several kinds, and a text of several documents to compare them on."""

import json
import random

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

WORDS = ["die", "Straße", "naïve", "house", "of", "the", "déjà", "vu", "und", "größer", "blue", "señor", "a", "\n"]
SPECIAL = ["<s>", "</s>", "<pad>", "<mask>", "<unk>"]
LENGTH = 12  # tokens in a sequence


def documents(number=30):
    """Texts of several lengths; one in five has a character that no tokenizer knows as a whole."""
    draws = random.Random(0)
    texts = [" ".join(draws.choices(WORDS, k=draws.randint(20, 60))) for _ in range(number)]
    return [text.replace("house", "house ☃", 1) if i % 5 == 0 else text for i, text in enumerate(texts)]


def byte_level(*, special=SPECIAL):
    """A tokenizer that writes each byte as a character, as GPT-2's and RoBERTa's."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([text.replace("☃", "") for text in documents()], trained)
    return with_special(backend)


def sentence_pieces():
    """A tokenizer that writes a space as ▁ and an unknown character as its bytes, as Llama 2's."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    trained = trainers.BpeTrainer(vocab_size=100, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator([text.replace("☃", "") for text in documents()], trained)
    whole = json.loads(backend.to_str())
    vocabulary = whole["model"]["vocab"]
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    return with_special(Tokenizer.from_str(json.dumps(whole)))


def with_special(backend):
    names = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
        "unk_token": "<unk>",
    }
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def gpt2(vocabulary, seed=0, width=8):
    """A GPT-2 whose matrices are drawn here: transformers draws other ones in other versions."""
    sizes = {"n_embd": width, "n_layer": 1, "n_head": 2, "n_positions": 16}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, bos_token_id=0, eos_token_id=1, **sizes))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for values in model.parameters():
            if values.ndim > 1:
                values.normal_(0, 0.3, generator=generator)
    return model.eval()


def bert(vocabulary, seed=0):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(vocab_size=vocabulary, max_position_embeddings=16, initializer_range=0.3, **sizes)
    return BertForMaskedLM(config).eval()


def llama(vocabulary, seed=0, **ends):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"bos_token_id": 0, "eos_token_id": 1, **ends}
    config = LlamaConfig(vocab_size=vocabulary, max_position_embeddings=16, initializer_range=0.3, **sizes)
    return LlamaForCausalLM(config).eval()
