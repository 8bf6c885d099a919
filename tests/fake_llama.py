"""A decoder layer of Llama 3.2 1B on the fake GPU, as SGLang runs it there, and its launches."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import PROMPT, Account, fake_cuda
from particle_cases import runner_of
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.models.llama import LlamaAttention

from sglang_smc.kernels.attention import work
from sglang_smc.models.chains import Chains
from sglang_smc.models.forward import ParticleForward
from sglang_smc.models.rotary import leave_rotations

HIDDEN, MLP, Q_HEADS, KV_HEADS, HEAD_DIM, VOCAB_SIZE = 2048, 8192, 32, 8, 64, 512
SLOTS, MAX_TAIL = 1000, 265
DTYPE = torch.bfloat16


class FakeLlama(torch.nn.Module):
    """One layer. SGLang's own kernels are names in the account; products are torch's."""

    def __init__(self, account: Account) -> None:
        super().__init__()
        self._account = account
        width = (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM
        self.attention = own = LlamaAttention.__new__(LlamaAttention)
        torch.nn.Module.__init__(own)
        own.q_size, own.kv_size = Q_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        own.qkv_proj, own.o_proj = Product(HIDDEN, width), Product(HIDDEN, HIDDEN)
        own.rotary_emb = RotaryEmbedding(HEAD_DIM, HEAD_DIM, PROMPT, 500_000, True, DTYPE)
        own.attn = RadixAttention(Q_HEADS, HEAD_DIM, 0.125, KV_HEADS, layer_id=0)
        self.gate_up, self.down = Product(HIDDEN, 2 * MLP), Product(MLP, HIDDEN)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, batch: Any) -> Any:
        with self._account.in_model():
            hidden = torch.empty(len(tokens), HIDDEN, dtype=DTYPE, device="cuda")
        begin = len(self._account.calls)
        hidden = self.attention(positions, self._norm(hidden), batch)
        gate_up, _ = self.gate_up(self._norm(hidden))
        self._account.calls.append("silu_and_mul")
        self.down(gate_up[:, :MLP])
        self.launches = self._account.calls[begin:]
        logits = torch.empty(batch.batch_size, VOCAB_SIZE, device="cuda")
        return SimpleNamespace(next_token_logits=logits, hidden_states=None)

    def _norm(self, hidden: torch.Tensor) -> torch.Tensor:
        self._account.calls.append("fused_add_rmsnorm")
        return hidden


class Product(torch.nn.Module):
    def __init__(self, width: int, height: int) -> None:
        super().__init__()
        self.weight, self.read = torch.empty(height, width, dtype=DTYPE, device="cuda"), 0

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, None]:
        self.read += self.weight.nbytes
        return torch.nn.functional.linear(rows, self.weight), None


def layer_pass(
    monkeypatch: pytest.MonkeyPatch, num_columns: int, size: int
) -> tuple[list[str], int]:
    """Launches of one layer, and the bytes of weights that its products read.

    As a draft of 8 particles of each of ``size`` requests runs it.
    """
    with fake_cuda(monkeypatch) as (gpu, account):

        def rotate(_: Any, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> Any:
            account.calls.append("apply_rope_with_cos_sin_cache_inplace")
            return q, k

        monkeypatch.setattr(RotaryEmbedding, "forward", rotate)
        monkeypatch.setattr(work, "chip_of", lambda _: work.H100)
        cache = torch.empty(SLOTS, KV_HEADS, HEAD_DIM, dtype=DTYPE, device="cuda")
        pool = SimpleNamespace(
            dtype=DTYPE,
            start_layer=0,
            layer_num=1,
            get_key_buffer=lambda _: cache,
            get_kv_buffer=lambda _: (cache, cache),
            set_kv_buffer=lambda *_: account.calls.append("store_cache"),
        )
        table = torch.zeros(1 + size, PROMPT, dtype=torch.int32, device="cuda")
        tails = torch.zeros(8 * len(table), 512, dtype=torch.int32, device="cuda")
        runner = runner_of(table, pool, DTYPE, (Q_HEADS, KV_HEADS), context_len=PROMPT)
        runner.model = model = FakeLlama(account).to("cuda")
        forward = ParticleForward(runner, tails, "triton", max_columns=9)
        leave_rotations(model, forward.attn_backend)
        chains = Chains.of_padding((size, 8, num_columns), MAX_TAIL, "cuda")
        with gpu.no_waiting(), account:
            forward.next_logits(chains)
        products = (one for one in model.modules() if isinstance(one, Product))
        return model.launches, sum(one.read for one in products)
