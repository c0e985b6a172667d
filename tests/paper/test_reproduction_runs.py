"""Every run of the study `paper` at the scales for GPUs: built, trained for two steps, measured on a few sentences.

The datasets that need a network have small stand-ins; models, algorithms, objectives and measures are the study's.
"""

import dataclasses
import shutil

import pytest
import torch
from tokenizers import BertWordPieceTokenizer, Tokenizer, models, pre_tokenizers
from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

from isoloss import pretrain
from isoloss.lab.evaluation.evaluator import Evaluator
from isoloss.lab.languages.config import CorpusConfig, TeacherConfig
from isoloss.paper.reproduction.design import BYTES, Costs, Tokens
from isoloss.paper.reproduction.study import STUDY
from isoloss.text.python_docs import write_python_docs

SCALES = ("workstation", "paper", "authors")
GIB = 2**30
LIMIT = 20 * GIB  # of memory for the weights, their gradient and AdamW's moments
WORDS = ["good", "bad", "film", "story", "actor", "scene", "light", "dark", "slow", "fast", "new", "old"]
SETTINGS = {
    **{"loss_sentences": 10, "num_sequences": 4, "num_train": 16, "num_test": 8, "probe_epochs": 1},
    **{"probe_seeds": 1, "finetune_epochs": 1, "finetune_seeds": 1},
}


def runs(scale):
    """One run of each kind: a dataset, a model, an algorithm, an objective and the stages after it."""
    found = {}
    for name, experiment in STUDY.scale(scale).experiments.items():
        config = experiment.config
        kind = config.language.kind, config.model, config.algorithm, config.objective, config.stages
        found.setdefault(kind, name)
    return list(found.values())


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory):
    """Text, a tokenizer, a teacher and tasks of text in the place of those on the hub."""
    folder = tmp_path_factory.mktemp("stand-ins")
    write_python_docs(folder / "text")
    tokenizer = BertWordPieceTokenizer(lowercase=True)
    tokenizer.train([str(path) for path in sorted((folder / "text").glob("*.txt"))[:20]], vocab_size=400)
    tokenizer.save_model(str(folder))
    words = Tokenizer(models.WordLevel({"<s>": 0, "<unk>": 1, **{w: i + 2 for i, w in enumerate(WORDS)}}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    teacher = folder / "teacher"
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    OPTForCausalLM(
        OPTConfig(vocab_size=2 + len(WORDS), max_position_embeddings=64, word_embed_proj_dim=16, **sizes, **ids)
    ).save_pretrained(teacher)
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", unk_token="<unk>").save_pretrained(teacher)
    for task, columns in (
        ("sst2", ["sentence"]),
        ("qnli", ["question", "sentence"]),
        ("rte", ["sentence1", "sentence2"]),
    ):
        (folder / task).mkdir()
        for split in ("train", "dev"):
            rows = ["\t".join([*columns, "label"])]
            for i in range(40):
                rows.append(
                    "\t".join(
                        [*(f"{WORDS[(i + j) % 12]} {WORDS[i * 5 % 12]}" for j in range(len(columns))), str(i % 2)]
                    )
                )
            (folder / task / f"{split}.tsv").write_text("\n".join(rows) + "\n")
    return folder


def language(config, stand_ins):
    """A language of the study, or its stand-in."""
    if config.kind == "corpus":
        return CorpusConfig(
            paths=(str(stand_ins / "text"),), tokenizer=str(stand_ins / "vocab.txt"), max_documents=20
        ).resolved()
    if config.kind == "teacher":
        tokens = tuple(range(2, 2 + len(WORDS)))
        return TeacherConfig(checkpoint=str(stand_ins / "teacher"), length=6, tokens=tokens).resolved()
    return config


def two_steps(config):
    """The same run with a step for each stage, at least two, of four sentences in micro-batches of two."""
    stages = tuple(dataclasses.replace(stage, steps=2) for stage in config.stages)
    # so low a rate that the features of deep models do not collapse within two steps of four sentences
    optimizer = dataclasses.replace(config.optimizer, warmup_steps=1, learning_rate=1e-5)
    steps = sum(stage.steps for stage in stages) or 2
    small = {"batch_size": 4, "micro_batch_size": 2, "device": "cpu", "threads": 0, "init_from": None}
    return dataclasses.replace(config, stages=stages, steps=steps, checkpoints=(), optimizer=optimizer, **small)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*have a label that none of the")  # of so few training examples
@pytest.mark.filterwarnings("ignore:.*and are truncated")
@pytest.mark.parametrize(("scale", "name"), [(scale, name) for scale in SCALES for name in runs(scale)])
def test_two_steps_of_every_model(scale, name, stand_ins, tmp_path, monkeypatch):
    experiment = STUDY.scale(scale).experiments[name]
    config = two_steps(dataclasses.replace(experiment.config, language=language(experiment.config.language, stand_ins)))
    needed = BYTES * Costs(config.model, Tokens(vocab_size=30_522, length=128)).parameters
    if needed > LIMIT:
        pytest.skip(f"needs {needed / GIB:.0f} GiB of memory")
    try:
        run = pretrain(tmp_path / "run", config)
        assert run.complete
        data = tuple(f"{task}={stand_ins / task}" for task in ("sst2", "qnli", "rte"))
        for part in experiment.measurements:
            settings = {**SETTINGS, "task_data": data} if name.startswith(("generated", "web", "text")) else SETTINGS
            evaluator = Evaluator(run, settings)
            for measure in part.measures:
                parameters = Costs(config.model, Tokens(vocab_size=202, length=32)).parameters
                if measure == "minimal-trace" and parameters > 3e8:
                    continue  # minutes on a processor; smaller models of the same architecture have it
                evaluation, _ = evaluator.measure(measure, config.steps)
                assert all(torch.isfinite(torch.tensor(each.value)) for each in evaluation.estimates.values())
    finally:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
