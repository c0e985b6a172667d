"""Sentences that can all be enumerated, models trained on them, and their minimal traces over all of them."""

import functools
import itertools

import numpy as np
import torch
from torch.func import functional_call
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from isoloss.flatness._parameters import ParameterColumns, embeddings
from isoloss.flatness._rescaling.apply import block_sizes
from isoloss.flatness._rescaling.solve import minimize
from isoloss.flatness._rescaling.symmetries import rescalings_of

WORDS, LENGTH = 5, 4
MASK, VOCABULARY = WORDS, WORDS + 1
_ENCODER = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16}
_SIZES = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_SIZES["attn_implementation"] = "eager"


def sentences():
    """All sentences (S, LENGTH) and their probabilities (S,): a Markov chain.

    No word is rare after another: of rare inputs, a sample of 64 has too small an error whatever it estimates.
    """
    rng = np.random.default_rng(3)
    start, steps = rng.dirichlet(np.ones(WORDS)), rng.dirichlet(np.full(WORDS, 0.6), size=WORDS)
    steps = 0.7 * steps + 0.3 / WORDS
    found = np.array(list(itertools.product(range(WORDS), repeat=LENGTH)))
    chances = start[found[:, 0]] * np.prod([steps[found[:, i], found[:, i + 1]] for i in range(LENGTH - 1)], axis=0)
    return torch.from_numpy(found), chances


def inputs(causal):
    """Batches' tensors of all inputs, and the probability of each: a masked model has one mask a sentence."""
    found, chances = sentences()
    if causal:
        return {"input_ids": found, "labels": found}, chances
    masked, labels = found.repeat_interleave(LENGTH, dim=0), torch.full((len(found) * LENGTH, LENGTH), -100)
    rows, places = torch.arange(len(masked)), torch.arange(LENGTH).repeat(len(found))
    labels[rows, places] = masked[rows, places]
    masked[rows, places] = MASK
    return {"input_ids": masked, "labels": labels}, np.repeat(chances / LENGTH, LENGTH)


@functools.cache
def trained(kind, *, steps=100, seed=0):
    """A model of float64 that has learned a good part of the language; only that of BERT is tied."""
    torch.manual_seed(seed)
    if kind == "bert":
        options = {**_SIZES, **_ENCODER, "pad_token_id": 0, "max_position_embeddings": LENGTH, "hidden_act": "relu"}
        model = BertForMaskedLM(BertConfig(**options))
    elif kind == "gpt2":
        options = {"n_embd": 12, "n_layer": 2, "n_head": 4, "n_inner": 16, "n_positions": LENGTH}
        options |= {"activation_function": "relu", "tie_word_embeddings": False}
        model = GPT2LMHeadModel(GPT2Config(**_SIZES, **options))
    else:
        model = LlamaForCausalLM(
            LlamaConfig(**_SIZES, **_ENCODER, num_key_value_heads=2, head_dim=4, max_position_embeddings=LENGTH)
        )
    model, (batch, chances) = model.double().eval(), inputs(kind != "bert")
    rng, optimizer = np.random.default_rng(seed), torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        drawn = rng.choice(len(chances), 64, p=chances)
        optimizer.zero_grad()
        model(**{name: value[drawn] for name, value in batch.items()}).loss.backward()
        optimizer.step()
    return model


def true_minimum(model, granularity):
    """The minimal trace over all inputs, and the part of it that is not of embeddings."""
    causal = not isinstance(model, BertForMaskedLM)
    found = rescalings_of(model, granularity=granularity)
    named = dict(model.named_parameters())
    columns = ParameterColumns(named, found.measured_blocks)
    measured = exact_shares(model, columns, *inputs(causal), causal=causal)
    sizes, log_rms = block_sizes(model, found)
    shares = np.pad(measured, (0, len(sizes) - len(measured)))
    least = minimize(shares, found.actions, log_rms=log_rms, sizes=sizes, writers=found.writers)
    embedded = embeddings(model, named)
    others = np.array([found.measured[owner] not in embedded for owner in columns.parameter_ids])
    return least.value, float((measured * least.weights[: len(measured)])[others].sum())


def exact_shares(model, columns, batch, chances, *, causal):
    """The parts of the trace (K,): all inputs with their probabilities, all labels with theirs, no ghost norms."""
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    predicted = batch["labels"] != -100
    if causal:
        predicted = torch.cat([predicted[:, 1:], torch.zeros_like(predicted[:, :1])], dim=1)
    rows, places = predicted.nonzero(as_tuple=True)

    def squares(ids, place):
        """The squares of the gradients of all labels' log-probabilities, weighted by these, summed: by parameter."""

        def log_probabilities(values):
            return (
                functional_call(model, values, kwargs={"input_ids": ids[None]})
                .logits[0]
                .gather(0, place.expand(1, VOCABULARY))[0]
                .log_softmax(dim=0)
            )

        weights = log_probabilities(parameters).exp()
        jacobian = torch.func.jacrev(log_probabilities)(parameters)
        return {name: torch.einsum("v,v...->...", weights, value**2) for name, value in jacobian.items()}

    weights = torch.from_numpy(chances)[rows]
    sums = {name: torch.zeros_like(value) for name, value in parameters.items()}
    for some in torch.arange(len(rows)).split(256):
        found = torch.func.vmap(squares)(batch["input_ids"][rows[some]], places[some])
        for name, value in found.items():
            sums[name] += torch.einsum("n,n...->...", weights[some], value)
    total = float(weights.sum())
    return torch.cat([columns.sums(name, sums[name]) for name in columns.of]).numpy() / total
