"""Which heads, layers and vocabularies a server takes, and what a head's law becomes."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from particle_cases import attend_by_hand
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from transformers import LlamaConfig, Qwen3Config

from sglang_smc.drafts.heads.base import architecture
from sglang_smc.drafts.heads.dflash import DFLASH
from sglang_smc.drafts.heads.dflash2 import DFLASH2
from sglang_smc.drafts.heads.dspark import DSPARK
from sglang_smc.drafts.heads.eagle import EAGLE
from sglang_smc.drafts.heads.eagle3 import EAGLE3, LATENT_EAGLE3
from sglang_smc.drafts.heads.lilicorr import LATTICE as PREFIX
from sglang_smc.drafts.heads.lilicorr import LILICORR
from sglang_smc.drafts.heads.mtp import MTP
from sglang_smc.models import head_kinds as kinds
from sglang_smc.models import supported, vocabulary, windows
from sglang_smc.models.softmax import Softmax
from sglang_smc.models.supported import check_layers
from sglang_smc.models.vocabulary import Vocabulary
from sglang_smc.ops import TORCH
from sglang_smc.options.request import request_config
from sglang_smc.options.server import SMCConfig
from sglang_smc.proposers import prompt_attention
from sglang_smc.proposers.assembly import connect
from sglang_smc.proposers.base import DraftSlots, LanguageModel, to_full_vocabulary
from sglang_smc.proposers.dflash import load_hot, mask_token
from sglang_smc.proposers.hot_tokens import cut_head, read_map
from sglang_smc.proposers.layer_choice import LayerChoice
from sglang_smc.round.costs import rehearse
from sglang_smc.smc.ledger import Ledger

pytestmark = pytest.mark.usefixtures("one_rank")
PARTIAL = SMCConfig(drafts_all=False)
NONE = torch.zeros(3, 1, 2, dtype=torch.int64)
SLOTS = DraftSlots(NONE, NONE, *cast("Any", (None, None)))


def model_config(config: Any) -> Any:
    return SimpleNamespace(
        hf_config=config,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_hidden_layers=config.num_hidden_layers,
        model_path=str(config.architectures),
        revision=None,
    )


TARGET = model_config(LlamaConfig(hidden_size=64, vocab_size=100, num_hidden_layers=8))


def eagle3(**more: Any) -> Any:
    sizes = {"hidden_size": 64, "vocab_size": 100, "draft_vocab_size": 32}
    given = {"architectures": [EAGLE3], "num_hidden_layers": 1, **sizes}
    made = LlamaConfig(**{**given, **more})
    return model_config(made)


NARROW = {"target_hidden_size": 64, "hidden_size": 32}
WINDOWED = {"layer_types": ["sliding_attention"], "sliding_window": 8, "use_sliding_window": True}


def with_ids(*ids: int, **more: Any) -> dict[str, Any]:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [*ids], **more}}


def latent(**more: Any) -> Any:
    return eagle3(architectures=[LATENT_EAGLE3], **more)


def unnamed() -> Any:
    made = eagle3()
    del made.hf_config.draft_vocab_size
    return made


def eagle(name: str = EAGLE[0], **more: Any) -> Any:
    made = eagle3(architectures=[name], **more)
    del made.hf_config.draft_vocab_size
    return made


def dflash(block_size: int = 9, hidden_size: int = 64, **own: Any) -> Any:
    made = Qwen3Config(hidden_size=hidden_size, vocab_size=100, num_hidden_layers=2)
    made.architectures = [DFLASH]
    made.block_size = block_size
    made.dflash_config = {"mask_token_id": 3, "target_layer_ids": [0, 2, 4], **own}
    return model_config(made)


def dflash2(**own: Any) -> Any:
    sizes = {"selector_rank": 4, "selector_top_k": 8, "conv_kernel_size": 2, "conv_group_size": 8}
    more = {"output_multiplier": 2.0, "final_logit_softcapping": 30.0}
    made = dflash(**{**sizes, **more, **own})
    made.hf_config.architectures = [DFLASH2]
    return made


DOMINO = {"projector_type": "domino", "gru_hidden_dim": 4, "emb_dim": 4}
DOMINO |= {"pure_draft_prefix_len": 1}


def domino(block_size: int = 9, hf: int = 100) -> Any:
    made = dflash(block_size, **DOMINO, shift_label=True)
    made.vocab_size = made.hf_config.vocab_size = hf
    return made


LATTICE = {"candidate_topk": 4, "hidden_size": 0, "num_layers": 1, "num_heads": 2}
LATTICE |= {"mlp_ratio": 2.0, "factor_dim": 4, "vector_eps": 1e-6, "logit_scale": 9.0}


def lilicorr(block_size: int = 9, **own: Any) -> Any:
    settings = {f"{PREFIX}{name}": value for name, value in LATTICE.items()}
    made = dflash(block_size, **{**settings, **own})
    made.hf_config.architectures = [LILICORR]
    return made


def dspark(markov: str = "vanilla", **own: Any) -> Any:
    made = dflash(8, projector_type="dspark", markov_rank=4)
    named = {"architectures": [DSPARK], "markov_head_type": markov}
    made.hf_config.update(named | own)
    made.vocab_size = made.hf_config.vocab_size
    return made


def mtp(count: int | None = 1, **own: Any) -> Any:
    return eagle3(architectures=["MiMoMTP"], num_nextn_predict_layers=count, **own)


def test_what_fits_is_taken() -> None:
    taken = [(eagle3(), "eagle3"), (eagle(), "eagle"), (eagle(EAGLE[1]), "eagle")]
    taken += [(eagle3(**NARROW, **with_ids(0, 3), num_aux_hidden_states=2), "eagle3")]
    taken += [
        (eagle3(**with_ids(0, 2, 4, parallel_draft_step=1, next_layer_regular=True)), "eagle3")
    ]
    taken += [(latent(), "eagle3"), (eagle3(**with_ids(0, 2, 4, norm_before_fc=True)), "eagle3")]
    taken += [(eagle3(draft_vocab_size=None), "eagle3"), (dflash(), "dflash"), (dspark(), "dflash")]
    taken += [(eagle3(**WINDOWED), "eagle3"), (eagle3(use_sliding_window=True), "eagle3")]
    taken += [(dspark("gated"), "dflash"), (dspark("rnn"), "dflash"), (dflash2(), "dflash")]
    taken += [(domino(), "dflash"), (lilicorr(), "dflash")]
    taken += [(mtp(), "mtp"), (TARGET, "model")]
    for config, kind in taken:
        assert kinds.kind_of(config) == kind
        assert list(kinds.draft_problems(config, TARGET, num_steps=8)) == []


def test_what_goes_into_the_last_norm_can_be_had_of_gpt_oss() -> None:
    target = LlamaConfig(hidden_size=64, vocab_size=100, num_hidden_layers=6)
    for names, fits in ((["GptOssForCausalLM"], True), (["LlamaForCausalLM"], False)):
        target.architectures = names
        found = kinds.draft_problems(eagle3(**with_ids(0, 2, 6)), model_config(target), num_steps=8)
        assert (list(found) == []) == fits


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (unnamed(), "has no draft_vocab_size"),
        (eagle3(hidden_size=32), "reads states of width 32, and the target's have 64"),
        (latent(**with_ids(0, 2, 4, norm_before_fc=True)), "with a norm of all states before fc"),
        (eagle3(**NARROW, draft_vocab_size=None), "has width 32 without an LM head"),
        (eagle3(vocab_size=99), "has vocab_size 99, and the target 100"),
        (
            eagle3(**with_ids(0, 2, 7)),
            r"reads what layers \[7\] of the target pass on; it gives out those of 0 to 6",
        ),
        (latent(norm_before_residual=True), r"with a norm before the residual \(norm_before_res"),
        (eagle3(attention_bias=True), "with biases of attention"),
        (eagle3(layer_types=["chunked_attention"]), r"with chunked_attention \(layer_types\)"),
        (eagle3(layer_types=["sliding_attention"]), "has sliding_window None, and layer_types"),
        (latent(**WINDOWED), "with windows over latents"),
        (eagle3(**with_ids(0, 2, 4, parallel_draft_step=2)), "with further heads"),
        (eagle3(**with_ids(0, 2, 4, next_layer_regular=True), num_hidden_layers=2), "ordinary"),
        (eagle3(eagle_aux_hidden_state_layer_ids=[0, 1]), "outside of eagle_config"),
        (eagle3(**with_ids(0, 2), num_aux_hidden_states=3), "3 and reads the states of 2 layers"),
        (eagle3(num_aux_hidden_states=4), "4 and reads the states of 3 layers"),
        (eagle3(**with_ids(2)), "reads states of its own width, 64, to which .* no fc"),
        (eagle3(architectures=["Qwen2ForCausalLM"]), "names Qwen2ForCausalLM in its config.json"),
        (eagle3(eagle_config={"use_aux_hidden_state": False}), "reads the last layer alone"),
        (dflash(block_size=8), "drafts blocks of 7 tokens, and --speculative-num-steps is 8"),
        (dflash(projector_type="dspark"), "is a block head with a projector"),
        (dflash(9, **DOMINO, shift_label=None), "cannot be read: .*shift_label to be a bool"),
        (domino(8), "drafts blocks of 7 tokens, and --speculative-num-steps is 8"),
        (domino(hf=96), "has vocab_size 96, and the target 100"),
        (dspark("lstm"), "has a Markov head of type 'lstm'; allowed: vanilla, gated, rnn"),
        (dspark(vocab_size=96), "has vocab_size 96, and the target 100"),
        (dspark(block_size=7), "drafts blocks of 7 tokens, and --speculative-num-steps is 8"),
        (dflash(hidden_size=32), "reads states of width 32"),
        (dflash(mask_token_id=None), "has no mask_token_id"),
        (dflash(mask_token_id=100), "has mask_token_id 100"),
        (dflash(target_layer_ids=[0, 9]), "cannot be read: .*out-of-range"),
        (dflash(conv_kernel_size=3, conv_group_size=8), "is a block head with convolutions"),
        (eagle3(architectures=["MistralForCausalLMEagle"]), "is an EAGLE head of a class that"),
        (eagle3(architectures=["Eagle3LlamaForCausalLM"]), "is an EAGLE-3 head of a class that"),
        (eagle(hidden_size=32), "reads states of width 32"),
        (eagle(bias=True), "has bias in its config.json"),
        (eagle3(architectures=["Qwen3NextForCausalLMMTP"]), "is an MTP layer of a kind that"),
        (mtp(hidden_size=32), "reads states of width 32"),
        (mtp(3), "has 3 MTP layers .*, and one alone drafts"),
        (mtp(None), "has no number of MTP layers"),
        (eagle(tie_word_embeddings=True), "ties its LM head .*, and the target has two"),
        (eagle3(architectures=["DFlash2TreeModel"]), "is a DFlash2 head of a class that is not"),
        (dflash2(projector_type="dspark"), "is a block head with a projector"),
        (dflash2(attention_sink_bias=True), "is a block head with attention sinks"),
        (dflash2(selector_rank=0, selector_top_k=0), "has no selector_rank in dflash_config"),
        (lilicorr(lilicorr_logit_scale=None), "has no lilicorr_logit_scale in dflash_config"),
        (lilicorr(8), "drafts blocks of 7 tokens, and --speculative-num-steps is 8"),
        (
            lilicorr(selector_rank=4, selector_top_k=8),
            "is a block head with a selector of candidates",
        ),
        (eagle3(architectures=["DSparkMiniMaxDraftModel"]), "is a DSpark head of a class that is"),
    ],
)
def test_what_does_not_fit_is_told(config: Any, told: str) -> None:
    (found,) = (one.what for one in kinds.draft_problems(config, TARGET, num_steps=8))
    assert re.search(told, found)


WEIGHED = "knows a part of the vocabulary alone"


@pytest.mark.parametrize(
    ("smc", "constrained", "refused"),
    [
        ({"evidence_threshold": 0}, False, WEIGHED),
        ({"power": 2.0, "proposal": "draft"}, False, WEIGHED),
        ({"power": 2.0}, False, None),
        ({"evidence_threshold": 0, "num_particles": 1}, False, WEIGHED),
        ({"proposal": "draft"}, True, "with a grammar, which keeps whole blocks"),
        ({}, True, None),
        ({"mode": "auto"}, True, None),
        ({}, False, None),
        ({"evidence_threshold": 0.1}, False, None),
        ({"mode": "exact"}, False, None),
        ({"tilt": 0.1}, False, None),
    ],
)
def test_weights_alone_are_refused_beside_a_part(
    smc: dict[str, Any], constrained: bool, refused: str | None
) -> None:
    request_config(SMCConfig(), {"smc": smc}, constrained=constrained)
    with pytest.raises(ValueError, match=refused) if refused else nullcontext():
        request_config(PARTIAL, {"smc": smc}, constrained=constrained)


def test_hot_tokens_get_their_places_and_others_nothing() -> None:
    logits = torch.tensor([[[1.0, 2.0]]])
    found = to_full_vocabulary(logits, torch.tensor([3, 0]), 4)
    assert found.tolist() == [[[2.0, -torch.inf, -torch.inf, 1.0]]]
    assert to_full_vocabulary(logits, None, 3).tolist() == [[[1.0, 2.0, -torch.inf]]]
    assert to_full_vocabulary(logits, None, 2) is logits


def table(value: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full((3, 2), value), requires_grad=False)


def head_of(config: Any, *, lacks_lm_head: bool, embedding: float = torch.nan) -> Any:
    """A head as it is loaded: what its checkpoint lacks is NaN."""
    head = torch.nn.Module()
    head_model = torch.nn.Module()
    head.model = head_model
    head_model.fc = torch.nn.Linear(2, 2)
    head_model.embed_tokens = torch.nn.Module()
    head.lm_head = torch.nn.Module()
    head_model.embed_tokens.weight = table(embedding)
    head.lm_head.weight = table(torch.nan if lacks_lm_head else 4.0)
    if kinds.kind_of(config) == "eagle3":
        head.hot_token_id = None
        head.load_lm_head_from_target = lacks_lm_head
    return head


EMBEDDING = table(1.0)
LM_HEAD = table(2.0)
OF_TARGET = SimpleNamespace(get_embed_and_head=lambda: (EMBEDDING, LM_HEAD))
OF_TARGET.set_eagle3_layers_to_capture = lambda _: None


def joined(head: Any, config: Any) -> None:
    pairs = zip((OF_TARGET, head), (TARGET, config), strict=True)
    runners = (SimpleNamespace(model=model, model_config=its) for model, its in pairs)
    workers = (cast("Any", SimpleNamespace(model_runner=runner)) for runner in runners)
    connect(*workers, config=SMCConfig())


def test_new_weights_go_where_captured_rounds_read_them() -> None:
    """A head's class replaces its list of hot tokens, and what latents are multiplied by."""
    hot = torch.tensor([1, 2])
    split = (torch.tensor([3.0]), torch.tensor([4.0]))
    attention = torch.nn.Module()
    attention.w_kc, attention.w_vc = split

    def load(weights: Any) -> None:
        list(weights)
        head.hot_token_id = torch.tensor([4, 5])
        attention.w_kc = torch.tensor([6.0])
        attention.w_vc = torch.tensor([7.0])

    head = head_of(latent(), lacks_lm_head=False)
    head.model.midlayer = torch.nn.Module()
    head.model.midlayer.self_attn = attention
    head.hot_token_id = hot
    head.load_weights = load
    joined(head, latent())
    head.load_weights([])
    read = head.hot_token_id, attention.w_kc, attention.w_vc
    assert all(now is before for now, before in zip(read, (hot, *split), strict=True))
    assert [tensor.tolist() for tensor in read] == [[4, 5], [6.0], [7.0]]


def test_new_hot_tokens_of_a_block_go_where_rounds_read_them() -> None:
    loaded: dict[str, Any] = {}
    hot = torch.tensor([0, 1])
    load_hot(loaded.update, hot, {"d2t": torch.tensor([2, 3]), "fc.weight": hot}.items())
    assert hot.tolist() == [2, 4] and [*loaded] == ["fc.weight"]


NAMES = ("model.embed_tokens.weight", "fc.weight", "lm_head.weight")


@pytest.mark.parametrize(
    ("config", "lacks_lm_head", "embedding", "own"),
    [
        (eagle(MTP["MiMoForCausalLM"]), True, torch.nan, NAMES[1:2]),
        (eagle(bias=False), True, torch.nan, NAMES[1:2]),
        (eagle(bias=False), True, 1.0, NAMES[1:2]),
        (eagle(bias=False), True, 3.0, NAMES[:2]),
        (eagle3(draft_vocab_size=None), True, torch.nan, NAMES[1:2]),
        (eagle3(), False, torch.nan, NAMES[1:]),
        (eagle3(), False, 1.0, NAMES[1:]),
        (eagle3(), False, 3.0, NAMES),
        (eagle3(**NARROW), False, 3.0, NAMES),
    ],
)
def test_what_a_head_lacks_is_the_targets(
    config: Any, lacks_lm_head: bool, embedding: float, own: tuple[str, ...]
) -> None:
    """And an embedding that equals the target's; one of its own stays, as it does not in SGLang."""
    loaded: list[str] = []
    head = head_of(config, lacks_lm_head=lacks_lm_head, embedding=embedding)
    head.load_weights = lambda weights: loaded.extend(name for name, _ in weights)
    joined(head, config)
    shared = {NAMES[0]: head.model.embed_tokens.weight is EMBEDDING}
    shared[NAMES[2]] = head.lm_head.weight is LM_HEAD
    assert {name for name, is_shared in shared.items() if is_shared} == set(NAMES) - {*own}
    head.load_weights((name, None) for name in NAMES)
    assert (*loaded,) == own
    assert bool(head.model.fc.bias.any()) == (kinds.kind_of(config) != "eagle")


def test_a_head_without_an_lm_head_is_not_run() -> None:
    with pytest.raises(ValueError, match=r"no weights for lm_head\.weight"):
        head = head_of(eagle3(), lacks_lm_head=True)
        head.load_lm_head_from_target = False
        head.load_weights = None
        joined(head, eagle3())


@pytest.mark.parametrize(
    ("config", "rows"), [(dflash(), 3), (dspark(), 2), (dspark(sample_from_anchor=False), 3)]
)
def test_a_block_drafts_from_its_masks_or_its_first_row_on(config: Any, rows: int) -> None:
    """With K = 2; what follows a token is added to the block's logits, which are its numbers."""
    drafter = kinds.drafter_of(config)
    drafts_from = drafter.first_row(config)
    shown: list[Any] = []

    def block_logits(blocks: Any, rows: slice) -> Any:
        shown.extend((blocks.tokens.tolist(), rows.start))
        logits = torch.arange(2.0).view(2, 1, 1, 1).expand(2, 1, 1, 4)
        return logits, logits

    forward: Any = SimpleNamespace(attn_backend=None, block_logits=block_logits)
    markov = SimpleNamespace(
        get_prev_embeddings=lambda tokens: torch.nn.functional.one_hot(tokens, 4).float(),
        project_bias=lambda embedded: 10 * embedded,
    )
    is_dspark = architecture(config.hf_config.to_dict()) == DSPARK
    given: dict[str, Any] = {"first": drafts_from} | ({"markov": markov} if is_dspark else {})
    head = drafter(forward, mask_token(config), **given)
    zeros = torch.zeros(4, 1, 1, dtype=torch.int64)
    first = head.first_logits(torch.tensor([[[1, 2]]]), DraftSlots(zeros, zeros, *SLOTS[2:]))
    assert shown == [[[[2, 3, 3][:rows]]], drafts_from]
    second = head.next_logits(1, torch.tensor([[0]]), SLOTS)
    bias = 10.0 * is_dspark
    assert first.tolist() == [[[0, 0, bias, 0]]]
    assert second.tolist() == [[[1 + bias, 1, 1, 1]]]
    few = {"hot": torch.tensor([1, 2, 4, 5]), "vocab_size": 6}
    head = drafter(forward, mask_token(config), **given, **few)
    head.first_logits(torch.tensor([[[1, 2]]]), DraftSlots(zeros, zeros, *SLOTS[2:]))
    none = -torch.inf
    second = head.next_logits(1, torch.tensor([[0]]), SLOTS)
    assert second.tolist() == [[[none, 1 + bias, 1, none, 1, 1]]]


# --- Layers


def runner(*, latent: bool = False, **layer: Any) -> Any:
    """A model runner whose second layer is as told; one of latent attention attends in two ways."""
    plain: dict[str, Any] = {"num_heads": 4, "head_dim": 8, "num_kv_heads": 2}
    absorbed = {**plain, "head_dim": 12, "v_head_dim": 8, "num_kv_heads": 1}
    made = {**plain, "head_dim": 6, "v_head_dim": 5, "num_kv_heads": 4}
    ways = [absorbed | layer, made] if latent else [plain | {"layer_id": 0}, plain | layer]
    layers = [RadixAttention(**{"layer_id": 1, **way}, scaling=1.0) for way in ways]
    config = SimpleNamespace(
        kv_lora_rank=8,
        get_num_attention_heads=lambda _: 4,
        get_num_kv_heads=lambda _: 4 if latent else 2,
    )
    model = torch.nn.Sequential(*layers)
    return SimpleNamespace(model=model, model_config=config, use_mla_backend=latent)


@pytest.mark.parametrize("softmax", [Softmax(0.5), Softmax(0.5, 1.5, torch.arange(4.0))])
@pytest.mark.parametrize(
    ("window", "limit"),
    [
        *((own, None) for own in (-1, 0, 3, 5, 40)),
        *((-1, limit) for limit in ((1, 0), (1, 3), (4, 2), (4, 9), (40, 4))),
        (9, (4, 2)),
        (3, (4, 2)),  # its own four are no more
    ],
)
@pytest.mark.parametrize("known", [0, 7])
def test_drafts_read_prompts_in_windows(
    monkeypatch: pytest.MonkeyPatch,
    window: int,
    limit: tuple[int, int] | None,
    known: int,
    softmax: Softmax,
) -> None:
    """Red where some of the queries are told too few or too many keys, at a window's edge."""
    if window < 0 and limit is None and softmax.cap:
        pytest.skip("a model with caps reads prompts by SGLang's backend where nothing limits it")
    monkeypatch.setattr(prompt_attention, "_AT_ONCE", 4)
    new = 11
    draw = torch.Generator().manual_seed(0)
    cache = torch.randn(2, 40, 2, 8, generator=draw)  # keys and values of 40 slots
    slots = torch.randperm(40, generator=draw)[: known + new]
    query = torch.randn(new, 4, 8, generator=draw)
    attention = prompt_attention.PromptAttention.__new__(prompt_attention.PromptAttention)
    attention.token_to_kv_pool = SimpleNamespace(get_kv_buffer=lambda _: cache)
    attention.group = 2
    layer = RadixAttention(4, 8, 1.0, 2, 0)
    layer.sliding_window_size = window  # 0, too
    sink = 0
    if limit is not None and windows.limit(torch.nn.Sequential(layer), *limit):
        window = limit[0] - 1
        sink = limit[1]
    found = attention._attend(query, slots, layer, softmax)
    for row in range(new):
        own = known + row
        first = 0 if window < 0 else max(own - window, 0)
        seen = torch.cat([slots[: min(sink, first)], slots[first : own + 1]])
        keys, values = cache[:, seen]
        expected = attend_by_hand(query[row], keys, values, softmax)
        torch.testing.assert_close(found[row].double(), expected, atol=1e-5, rtol=1e-5)


def test_a_draft_keeps_windows_of_its_own_that_are_shorter() -> None:
    """And only limited models read prompts by the attention of this package."""
    layers = [RadixAttention(4, 8, 1.0, 2, 0, sliding_window_size=own) for own in (-1, 3, 4, 9)]
    model = torch.nn.Sequential(*layers)
    assert not windows.is_limited(model) and not windows.limit(layers[1], 4, 2)
    assert windows.limit(model, 5, 2) == 2 and windows.is_limited(model)
    limit = windows.KeyWindow(4, 2)
    assert list(map(windows.window_of, layers)) == [limit, (3, 0), (4, 0), limit]


WINDOW = {"sliding_window_size": 31}
ENCODER = {"attn_type": AttentionType.ENCODER_ONLY}
CROSS = "cross or bidirectional attention"


@pytest.mark.parametrize(
    ("layer", "refused"),
    [
        ({}, None),
        (WINDOW, None),
        ({"logit_cap": 50.0}, None),
        ({"use_irope": True}, "chunked attention"),
        ({"logit_cap": 50.0, "logit_capping_method": "clip"}, "a cap other than by tanh"),
        ({"v_head_dim": 4}, "different key and value widths"),
        ({"num_kv_heads": 4}, "layers of unlike head groups"),
        (ENCODER, CROSS),
        # Where blocks are run, with causal layers among them, which may have a window.
        ({"blocks": True, **ENCODER}, None),
        ({"blocks": True, **WINDOW}, None),
        ({"blocks": True, **ENCODER, **WINDOW}, None),
        ({"blocks": True, "attn_type": AttentionType.DECODER_BIDIRECTIONAL}, CROSS),
        ({"blocks": True, **ENCODER, "is_cross_attention": True}, CROSS),
        ({"latent": True}, None),
        ({"latent": True, **WINDOW}, "a window or a cap over latents"),
    ],
)
def test_unsupported_attention_is_refused(layer: dict[str, Any], refused: str | None) -> None:
    model = runner(**{name: value for name, value in layer.items() if name != "blocks"})
    told = f"does not support {refused}.*.layer 1"
    with pytest.raises(ValueError, match=told) if refused else nullcontext():
        check_layers(model, blocks="blocks" in layer)


@pytest.mark.parametrize(
    ("kind", "capability", "refused"),
    [
        (torch.float8_e4m3fn, (8, 0), True),
        (torch.float8_e4m3fn, (8, 9), False),
        (torch.float8_e5m2, (8, 0), False),
        (torch.float8_e4m3fn, None, False),
    ],
)
def test_keys_that_a_kernel_cannot_convert_are_refused(
    kind: torch.dtype, capability: tuple[int, int] | None, refused: bool
) -> None:
    with pytest.raises(ValueError, match="fp8_e5m2") if refused else nullcontext():
        supported.check_kernel_type(kind, capability)


def model(fails: Callable[..., Any] | None = None) -> Any:
    """Stands for a `ParticleForward`, whose layers may fail."""
    run = fails or (lambda chains: torch.zeros(*chains.starts.shape, 8))
    passes = {"next_logits": run, "chain_logits": lambda chains: run(chains).unsqueeze(2)}
    return SimpleNamespace(**passes, attn_backend=None)


def rehearsed(target: Any, draft: Any) -> None:
    table = torch.zeros(2, 16, dtype=torch.int32)
    ledger = Ledger(table, table, num_particles=1, max_tail=4, num_slots=8)
    rehearse(target, LanguageModel(draft, cast("Any", None)), ledger, TORCH)


UNLIKE = RuntimeError(
    "expected m1 and m2 to have the same dtype, but got: c10::BFloat16 != c10::Half"
)
WANTS = AttributeError("'NoneType' object has no attribute 'mrope'")


@pytest.mark.parametrize(
    ("module", "error", "told"),
    [
        ("sglang.srt.models", WANTS, "cannot run over particles: AttributeError: .*'mrope'"),
        (
            "sglang_smc.kernels.attention.latent",
            RuntimeError("out of resource: shared memory"),
            "pass --speculative-smc-kernels torch",
        ),
        ("sglang.srt.models", torch.OutOfMemoryError("80 GiB"), "smaller --mem-fraction-static"),
        ("sglang.srt.models", UNLIKE, "c10::Half. Pass --dtype, such as --dtype bfloat16, "),
        ("sglang.srt.models", ValueError("no such layer"), "Choose another model"),
    ],
)
def test_the_model_whose_pass_fails_is_named(module: str, error: Exception, told: str) -> None:
    rehearsed(model(), model())
    scope: dict[str, Any] = {"__name__": module, "error": error}
    exec("def run(*_):\n    raise error", scope)
    failing = model(scope["run"])
    for flag, pair in {
        "--model-path": (failing, model()),
        "--speculative-draft-model-path": (model(), failing),
    }.items():
        with pytest.raises(ValueError, match=f"^{flag} .*{told}"):
            rehearsed(*pair)


# --- Vocabularies

TOKENS = {"a": 0, "b": 1, "c": 2, "d": 3}


def of(width: int, **other: int) -> Vocabulary:
    return Vocabulary({**TOKENS, **other}, width)


MARKED = {**TOKENS, "<image>": 4}


@pytest.mark.parametrize(
    ("target", "draft", "says"),
    [
        *((of(target), of(draft), None) for target, draft in ((4, 4), (4, 6), (6, 4), (8, 6))),
        # Gemma 3's tokenizer has a marker for images behind all that its text models have.
        (*(Vocabulary(MARKED, width, frozenset({"<image>"})) for width in (6, 4)), None),
        # Without tokenizers widths are all there is; and where they agree, ids beyond them are the
        # tokenizer's own affair.
        (Vocabulary(None, 4), Vocabulary(None, 4), None),
        (of(3), of(3), None),
        (of(4), of(4, a=1, b=0), "2 tokens differ: 'a' is 0 in the target and 1 in the draft"),
        (of(5), of(5, e=4), "1 tokens differ: 'e' is None in the target and 4 in the draft"),
        (of(4), of(3), "4 in the target and 3 in the draft, and text has ids up to 3"),
        (of(3), of(4), "3 in the target and 4 in the draft, and text has ids up to 3"),
        (Vocabulary(None, 4), of(5), "leave out --skip-tokenizer-init"),
        (of(4), Vocabulary(None, 5), "leave out --skip-tokenizer-init"),
    ],
)
def test_vocabularies_may_differ_by_padding(
    target: Vocabulary, draft: Vocabulary, says: str | None
) -> None:
    remedy = r"Choose a draft of the target's family\.$"
    told = rf"^--speculative-draft-model-path: .*{re.escape(says or '')}.*{remedy}"
    with pytest.raises(ValueError, match=told) if says else nullcontext():
        vocabulary.check_tokens(target, draft)


def test_markers_that_differ_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """R1-Distill-Llama has Llama's text, and markers of its own in the places of Llama's."""
    sides = [Vocabulary({**TOKENS, name: 4}, 5, frozenset({name})) for name in ("<a>", "<b>")]
    caplog.set_level("WARNING")  # engines of other tests have set another
    vocabulary.check_tokens(sides[0], sides[0])
    assert not caplog.messages
    vocabulary.check_tokens(*sides)
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith("2 special tokens differ")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ([3, 4, 3], "3 token ids in 1 dimensions, 2 of them different and from 0 to 4"),
        ([4, 5], "2 token ids in 1 dimensions, 1 of them"),
        ([-1, 2], "allowed: a list of such ids"),
        ([], "0 token ids"),
        ([[1, 2]], "in 2 dimensions"),
        ({"a": 1}, "cannot be read"),
        (None, "Pass a file that torch.save wrote"),
    ],
)
def test_what_is_no_list_of_tokens_is_no_map(tmp_path: Path, content: Any, told: str) -> None:
    path = str(tmp_path / "map.pt")
    torch.save([4, 0], path)
    assert read_map(path, 5).tolist() == [4, 0]
    if content is None:
        Path(path).write_text("0\n4\n")
    else:
        torch.save(content, path)
    with pytest.raises(ValueError, match=f"(?s)^--speculative-token-map .*{told}"):
        read_map(path, 5)


@pytest.mark.parametrize("name", ["lm_head", "output"])
def test_an_lm_head_that_is_quantized_or_unknown_is_not_cut(name: str) -> None:
    model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 8)})
    with pytest.raises(ValueError, match="a draft of ModuleDict, whose LM head is quantized or of"):
        cut_head(model, torch.tensor([3]))


def padded(width: int, num_missing: int, hot: torch.Tensor | None = None) -> LanguageModel:
    """A draft with logits of a width, behind which, or within, the target's end."""
    table = torch.arange(width * width).float().view(width, width)  # no row of an id beyond it
    draft: Any = SimpleNamespace(
        attn_backend="its own",
        next_logits=lambda chains: table[chains.tokens[:, :, -1]],
        chain_logits=lambda chains: table[chains.tokens],
    )
    runner: Any = SimpleNamespace(model_config=SimpleNamespace(vocab_size=width))
    return LanguageModel(draft, runner, num_missing, hot)


def test_what_the_draft_lacks_it_never_proposes_and_reads_as_its_last_id() -> None:
    draft = padded(4, num_missing=2)
    nothing = [-torch.inf] * 2
    logits = draft.first_logits(torch.tensor([[[0, 1], [2, 5]]]), SLOTS)
    assert logits.tolist() == [[[4, 5, 6, 7, *nothing], [12, 13, 14, 15, *nothing]]]
    assert torch.equal(draft.next_logits(0, torch.tensor([[1, 5]]), SLOTS), logits)
    assert draft.attn_backend == "its own"


@pytest.mark.parametrize(("num_missing", "behind"), [(0, 0), (2, 2), (-1, -1)])
def test_frequent_tokens_get_their_places(num_missing: int, behind: int) -> None:
    """Three logits for two tokens: two ranks have as many rows each."""
    draft = padded(3, num_missing, hot=torch.tensor([1, 0]))
    as_it_is: Any = SimpleNamespace(of=lambda forward, *_: forward)
    draft.layer_choice = LayerChoice()
    recorded = draft.recorded(as_it_is)
    assert isinstance(recorded, LanguageModel) and recorded is not draft
    assert recorded.layer_choice is draft.layer_choice, "what a server chose is told"
    logits = recorded.next_logits(0, torch.tensor([[1]]), SLOTS)
    assert logits.tolist() == [[[4, 3, *[-torch.inf] * (1 + behind)]]]


def test_what_the_target_lacks_is_cut_off() -> None:
    logits = padded(6, num_missing=-2).next_logits(0, torch.tensor([[1, 3]]), SLOTS)
    assert logits.tolist() == [[[6, 7, 8, 9], [18, 19, 20, 21]]]
    assert logits.is_contiguous()
