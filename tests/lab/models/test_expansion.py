"""Small transformers inside large ones: the same logits, at every shape, and what eps does to that."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaPreLayerNormConfig,
    RobertaPreLayerNormForMaskedLM,
)

from isoloss.checkpoints.loading import quiet
from isoloss.errors import IsolossError
from isoloss.lab.models.architectures import SIZES, Shape
from isoloss.lab.models.expansion import Part, check_fits, expand, shape_of

VOCAB, LENGTH, PAD = 11, 5, 9
SMALL = Shape(d_model=8, num_heads=2, num_layers=2, intermediate=12)
LARGE = Shape(d_model=24, num_heads=6, num_layers=4, intermediate=36)
CLASSES = {
    "bert": (BertForMaskedLM, BertConfig),
    "roberta": (RobertaForMaskedLM, RobertaConfig),
    "pre-ln": (RobertaPreLayerNormForMaskedLM, RobertaPreLayerNormConfig),
    "opt": (OPTForCausalLM, OPTConfig),
}
POST_LN = ("bert", "roberta")


def built(kind, shape=SMALL, *, seed=0, noise=0.3, dtype=torch.float64, **changes):
    """A model with random weights, gammas, betas and biases."""
    model_class, config_class = CLASSES[kind]
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": shape.d_model,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "max_position_embeddings": LENGTH if kind in ("bert", "opt") else PAD + 1 + LENGTH,
        "pad_token_id": PAD,
        "bos_token_id": None,
        "eos_token_id": None,
        "attn_implementation": "eager",
        **(
            {"ffn_dim": shape.intermediate, "word_embed_proj_dim": shape.d_model}
            if kind == "opt"
            else {"intermediate_size": shape.intermediate, "layer_norm_eps": 1e-12}
        ),
        **changes,
    }
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config_class(**settings)).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
    return model


def padded(n=6, vocab=PAD, length=LENGTH):
    """Sentences of several lengths, padded on the right."""
    ids = torch.randint(0, vocab, (n, length), generator=torch.Generator().manual_seed(5))
    mask = (torch.arange(length) < torch.tensor([length, 3, 1, 4, length, 2])[:n, None]).long()
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}


@torch.no_grad()
def gap(small, large, inputs):
    """The largest difference of logits at tokens over the largest logit."""
    present = inputs["attention_mask"].bool()
    few, many = (model(**inputs).logits[present] for model in (small, large))
    return float((few - many).abs().max() / few.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(
    ("kind", "scale"),
    [("opt", "exact"), *itertools.product(["bert", "roberta", "pre-ln"], ["exact", "balanced", "paper"])],
)
def test_the_logits_are_the_same(kind, scale, dtype):
    small = built(kind, dtype=dtype)
    large = expand(small, LARGE, embedding_scale=scale).model
    assert shape_of(large) == LARGE
    assert large.dtype == dtype
    assert gap(small, large, padded()) < (1e-5 if dtype == torch.float32 else 1e-9)


@st.composite
def pairs(draw):
    head, heads, ratio = draw(st.sampled_from([2, 3, 4])), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    layers, inner = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    small = Shape(head * heads, heads, layers, inner)
    return small, Shape(
        head * heads * ratio, heads * ratio, layers + draw(st.integers(0, 3)), inner * draw(st.integers(1, 4))
    )


@settings(max_examples=25, deadline=None)
@given(kind=st.sampled_from(list(CLASSES)), shapes=pairs(), seed=st.integers(0, 1000))
def test_the_logits_are_the_same_at_every_pair_of_shapes(kind, shapes, seed):
    small = built(kind, shapes[0], seed=seed)
    assert gap(small, expand(small, shapes[1]).model, padded()) < 1e-9


@pytest.mark.parametrize("kind", CLASSES)
def test_the_heads_layers_and_ratio_of_table_4s_farthest_pair(kind):
    """d128 in d1920 but for the width of a head, which is 2 here and not 64."""
    small = built(kind, Shape(4, 2, 4, 16))
    assert gap(small, expand(small, Shape(60, 30, 20, 240)).model, padded()) < 1e-9


@pytest.mark.parametrize(
    ("kind", "scale"),
    [("opt", "exact"), *itertools.product(["bert", "roberta", "pre-ln"], ["exact", "balanced", "paper"])],
)
@pytest.mark.parametrize("heads", [1, 3])
def test_a_single_head_becomes_wider_ones(kind, scale, heads):
    """Six times as wide, and with three heads each of these twice as wide as the small model's."""
    small = built(kind, Shape(6, 1, 2, 12))
    found = expand(small, Shape(36, heads, 3, 72), embedding_scale=scale)
    assert gap(small, found.model, padded()) < 1e-9
    queries = [part for name, part in found.parts.items() if name.endswith(("query.weight", "q_proj.weight"))]
    assert [part.trace_factor for part in queries] == pytest.approx([(6 / heads) ** 0.5] * 2)


# --- where blocks end in a layer norm --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", POST_LN)
def test_the_papers_way_to_add_post_layer_norm_layers_changes_the_function(kind):
    """O = U = 0 alone: the small model's last gamma and beta stay, and the next layer norm undoes them."""
    small = built(kind)
    large = expand(small, LARGE).model
    blocks = large.base_model.encoder.layer
    own, last = blocks[SMALL.num_layers - 1].output.LayerNorm, blocks[-1].output.LayerNorm
    own.load_state_dict(last.state_dict())
    torch.nn.init.ones_(last.weight)
    torch.nn.init.zeros_(last.bias)
    assert gap(small, large, padded()) > 0.01


def normalized(small, inputs):
    """The states after the small model's last layer norm without its gamma and beta, and the variance before it."""
    seen = []
    norm = small.base_model.encoder.layer[-1].output.LayerNorm
    hook = norm.register_forward_hook(lambda _module, args, output: seen.append((args[0], output)))
    small(**inputs)
    hook.remove()
    ((before, after),) = seen
    return (after - norm.bias) / norm.weight, before.var(dim=-1, unbiased=False, keepdim=True)


@pytest.mark.parametrize("eps", [1e-12, 1e-5, 1e-2])
@torch.no_grad()
def test_added_post_layer_norm_layers_rescale_by_what_eps_does(eps):
    """Each layer norm after the small model's last divides by sqrt(v + eps), v the variance that the last one left."""
    small = built("bert", layer_norm_eps=eps)
    large = expand(small, LARGE).model
    hat, variance = normalized(small, padded())
    v = variance / (variance + eps)
    factor = torch.ones_like(v)
    for _ in range(2 * (LARGE.num_layers - SMALL.num_layers)):
        factor = factor / (v + eps).sqrt()
        v = v / (v + eps)
    norm = small.base_model.encoder.layer[-1].output.LayerNorm
    expected = norm.weight * hat * factor + norm.bias
    found = large.base_model(**padded()).last_hidden_state
    torch.testing.assert_close(found, expected.repeat(1, 1, 3), rtol=1e-11, atol=1e-11)
    # to first order in eps, as docs/method/expansion.md has it
    first_order = 1 + eps / 2 * (1 / variance - 1)
    assert float((factor - first_order).abs().max()) <= 20 * eps**2 + 1e-14


@pytest.mark.parametrize("kind", CLASSES)
def test_width_alone_and_pre_layer_norm_depth_are_exact_at_a_large_eps(kind):
    small = built(kind, **({} if kind == "opt" else {"layer_norm_eps": 0.1}))
    depth = SMALL.num_layers if kind in POST_LN else LARGE.num_layers
    large = expand(small, Shape(LARGE.d_model, LARGE.num_heads, depth, LARGE.intermediate)).model
    assert gap(small, large, padded()) < 1e-13


@pytest.mark.parametrize(("scale", "times"), [("balanced", 3), ("paper", 9)])
def test_divided_embeddings_see_a_larger_eps(scale, times):
    small = built("pre-ln", layer_norm_eps=0.1)
    large = expand(small, LARGE, embedding_scale=scale).model
    assert gap(small, large, padded()) > 1e-3
    small.base_model.embeddings.LayerNorm.eps *= times
    assert gap(small, large, padded()) < 1e-13


# --- what is made of what --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CLASSES)
def test_every_parameter_is_copies_or_added(kind):
    small = built(kind)
    found = expand(small, LARGE)
    own, large = dict(small.named_parameters()), dict(found.model.named_parameters())
    assert set(found.parts) == set(own)
    assert {part.name for part in found.parts.values()} | set(found.added) == set(large)
    assert len(found.parts) + len(found.added) == len(large)
    for name, part in found.parts.items():
        assert large[part.name].numel() == part.copies * own[name].numel()
        total = large[part.name].sum() * part.divisor / part.copies
        torch.testing.assert_close(total, own[name].sum())
    assert {large[name].unique().item() for name in found.added} == {0.0, 1.0}


def test_trace_factors():
    parts = expand(built("bert"), Shape(24, 6, 4, 24)).parts  # three times as wide, twice inside
    factors = {name.removeprefix("bert.encoder.layer.0."): part.trace_factor for name, part in parts.items()}
    assert factors["attention.self.query.weight"] == factors["cls.predictions.transform.dense.weight"] == 1
    assert factors["attention.self.query.bias"] == factors["output.LayerNorm.weight"] == pytest.approx(1 / 3)
    assert factors["intermediate.dense.weight"] == pytest.approx(3 / 2)
    assert factors["intermediate.dense.bias"] == pytest.approx(1 / 2)
    assert factors["output.dense.weight"] == pytest.approx(2 / 3)
    assert factors["cls.predictions.bias"] == 1
    assert Part(name="x", blocks=(4,), divisor=2.0).trace_factor == 1


def test_a_decoder_of_its_own_is_placed_too():
    small = built("bert", tie_word_embeddings=False)
    found = expand(small, LARGE, embedding_scale="balanced")
    assert found.parts["cls.predictions.decoder.weight"].copies == 3
    assert gap(small, found.model, padded()) < 1e-9


def test_nothing_else_is_touched():
    small = built("bert")
    before = {name: value.clone() for name, value in small.state_dict().items()}
    state = torch.get_rng_state()
    large = expand(small, LARGE).model
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in small.state_dict().items())
    assert shape_of(small) == SMALL
    assert not large.training
    assert large.get_output_embeddings().weight is large.get_input_embeddings().weight


def test_the_large_model_is_a_checkpoint(tmp_path):
    large = expand(built("bert"), LARGE).model
    large.save_pretrained(tmp_path)
    with quiet():
        again = AutoModelForMaskedLM.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="eager").eval()
    weights = again.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in large.state_dict().items())
    assert gap(large, again, padded()) < 1e-14


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("large", "reason"),
    [
        (Shape(192, 3, 5, 768), "192 is not a multiple of 128; the sizes that hold it are d128, d256, d384,"),
        (Shape(256, 8, 6, 1024), "its heads have 64 dimensions, and those have 32"),
        (Shape(256, 2, 6, 1024), "its heads have 64 dimensions, and those have 128"),  # two heads do not become wider
        (Shape(256, 4, 6, 1000), "the feed-forward width 1000 is not a multiple of 512"),
        (Shape(256, 4, 3, 1024), "3 layers do not hold 4"),
    ],
)
def test_shapes_that_do_not_fit(large, reason):
    with pytest.raises(IsolossError, match=reason):
        check_fits(SIZES["d128"], large)


def test_the_pairs_of_table_4_that_fit():
    def fits(small, large):
        try:
            check_fits(SIZES[small], SIZES[large])
        except IsolossError:
            return False
        return True

    table = ["d128", "d192", "d320", "d384", "d640", "d960", "d1920"]
    found = [(small, large) for i, small in enumerate(table) for large in table[i + 1 :] if fits(small, large)]
    assert found == [
        *(("d128", large) for large in ("d384", "d640", "d1920")),
        *(("d192", large) for large in ("d384", "d960", "d1920")),
        *(("d320", large) for large in ("d640", "d960", "d1920")),
        *((small, "d1920") for small in ("d384", "d640", "d960")),
    ]


def test_models_that_cannot_be_expanded():
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1, n_positions=8))
    with pytest.raises(IsolossError, match=r"GPT2LMHeadModel cannot be expanded; the architectures are Bert"):
        expand(gpt2, LARGE)
    with pytest.raises(IsolossError, match="is a decoder"):
        expand(built("roberta", is_decoder=True), LARGE)
    for variant in (
        {"do_layer_norm_before": False},
        {"word_embed_proj_dim": 4},
        {"_remove_final_layer_norm": True},
        {"layer_norm_elementwise_affine": False},
    ):
        with pytest.raises(IsolossError, match="this one is a variant"):
            expand(built("opt", **variant), LARGE)


def test_scales_that_there_are_not():
    with pytest.raises(IsolossError, match="the embedding scale is 'half'; it must be exact, balanced or paper"):
        expand(built("bert"), LARGE, embedding_scale="half")
    with pytest.raises(IsolossError, match="OPTForCausalLM has no layer norm after its embeddings"):
        expand(built("opt"), LARGE, embedding_scale="balanced")
