"""A task of lm-evaluation-harness, run on a model as a measure, beside the model's own log-probabilities."""

import json
import math

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from isoloss import evaluate
from isoloss.errors import IsolossError

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install 'isoloss[eval]'")

WORDS = list("abcdefgh")
TEXTS = ["a b c d", "b c", "h g f e d c b a", "a a a", "c d"]  # the last one is left out by the limit
TASK = """
task: letters
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
"""


@pytest.mark.filterwarnings("ignore")  # of the packages that lm-evaluation-harness takes
def test_a_task_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "letters.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    (tmp_path / "letters.yaml").write_text(TASK % (tmp_path / "letters.jsonl"))
    (tmp_path / "text.txt").write_text("\n\n".join(TEXTS))
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<end>", *WORDS])}, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    torch.manual_seed(0)
    sizes = {"vocab_size": len(fast), "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 16}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    model.save_pretrained(tmp_path / "model")
    fast.save_pretrained(tmp_path / "model")

    settings = {"lm_eval_include_path": str(tmp_path), "lm_eval_limit": 4}
    (found,) = evaluate(tmp_path / "model", ["lm-eval-letters"], data=tmp_path / "text.txt", settings=settings)
    total = 0.0
    for text in TEXTS[:4]:
        ids = torch.tensor([[0, *fast.encode(text)]])
        with torch.no_grad():
            total += float(-model(ids, labels=ids).loss * (ids.shape[1] - 1))
    bits = found.estimates["letters.bits_per_byte"]
    assert bits.value == pytest.approx(-total / math.log(2) / sum(map(len, TEXTS[:4])), rel=1e-5)
    assert bits.samples == 4
    assert bits.stderr > 0
    with pytest.raises(IsolossError, match=r"has no task 'leters'; did you mean letters\?"):
        evaluate(tmp_path / "model", ["lm-eval-leters"], data=tmp_path / "text.txt", settings=settings)
