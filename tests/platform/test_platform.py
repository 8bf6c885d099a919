"""When the CPU platform serves, what it defaults and what it refuses."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import platforms
from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.cuda import CudaSRTPlatform

from sglang_smc.cpu import platform, threads
from sglang_smc.cpu.platform import PlainCpuPlatform


@pytest.mark.parametrize(
    ("accelerator", "environment", "expected"),
    [
        (False, {}, PlainCpuPlatform),
        (True, {}, CudaSRTPlatform),
        (True, {"SGLANG_PLATFORM": platform.PLATFORM_NAME}, PlainCpuPlatform),
        (False, {"SGLANG_USE_CPU_ENGINE": "1"}, CpuSRTPlatform),
    ],
)
def test_sglang_chooses_it_where_no_other_serves(monkeypatch, accelerator, environment, expected):
    """By SGLang's own resolution, through the installed entry point, with a CUDA device or none."""
    for name in ("SGLANG_PLATFORM", "SGLANG_USE_CPU_ENGINE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator)
    monkeypatch.setattr(platforms, "_is_cuda_available", lambda: accelerator)
    assert type(platforms._resolve_platform()) is expected


@pytest.fixture
def make_args(monkeypatch):
    """Server arguments as SGLang hands them over: device and AMX backend already filled in."""
    monkeypatch.setattr(threads, "set_default_environment", lambda **sizes: None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def make(**changes):
        absent = ("page_size", "max_total_tokens", "mem_fraction_static", "speculative_algorithm")
        given = {"device": "cpu", "attention_backend": "intel_amx", "dtype": "auto"}
        given |= {"enable_torch_compile": False, "lora_backend": "csgmv"}
        given |= {"tp_size": 1, "dp_size": 1, "hicache_mem_layout": "page_first"}
        args: Any = SimpleNamespace(**{**dict.fromkeys(absent), **given, **changes})
        PlainCpuPlatform().apply_server_args_defaults(args)
        return args

    return make


@pytest.mark.parametrize(("multiplies_it", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_bfloat16_where_the_processor_multiplies_it(make_args, monkeypatch, multiplies_it, dtype):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: multiplies_it)
    assert make_args().dtype == dtype


def test_defaults_leave_what_the_user_chose(make_args, monkeypatch):
    args = make_args()
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # else Triton's adapters do not run
    assert args.attention_backend == args.lora_backend == "torch_native"
    assert args.max_total_tokens and args.mem_fraction_static
    chosen = {"attention_backend": "flex_attention", "dtype": "bfloat16", "lora_backend": "triton"}
    chosen["mem_fraction_static"] = 0.2  # asks for a cache sized by memory
    args = make_args(**chosen)
    assert {name: getattr(args, name) for name in chosen} == chosen
    assert args.max_total_tokens is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "cuda"}, "hide the accelerator"),
        ({"speculative_algorithm": "NGRAM"}, "speculative_algorithm='NGRAM' .allowed: 'SMC'"),
        ({"enable_torch_compile": True}, "enable_torch_compile"),
        ({"enable_memory_saver": True}, "enable_memory_saver"),
        ({"hicache_mem_layout": "page_head"}, "'page_head' .allowed: 'layer_first'"),
        ({"attention_backend": "triton"}, "attention_backend='triton' .allowed: 'torch_native'"),
        ({"prefill_attention_backend": "flashinfer"}, "'flashinfer' .allowed: 'torch_native'"),
        ({"lora_backend": "triton"}, "lora_backend='triton' .allowed: 'torch_native'"),
    ],
)
def test_refusals(make_args, change, message):
    with pytest.raises(ValueError, match=message):
        make_args(**change)


def test_the_pool_moves_slots_without_a_kernel():
    """As pools are where speculation is on."""
    pool = PlainCpuPlatform().get_kv_pool_cls(kind="mha")(
        8, 1, torch.float32, 2, 4, 1, "cpu", enable_memory_saver=False, enable_kv_cache_copy=True
    )
    keys = pool.get_key_buffer(0)
    keys.copy_(torch.arange(keys.numel()).view_as(keys))
    expected = keys[[0, 1, 7, 3, 4, 1, 6, 7, 8]]
    pool.move_kv_cache(torch.tensor([2, 5]), torch.tensor([7, 1]))
    assert torch.equal(keys[1:], expected[1:])
