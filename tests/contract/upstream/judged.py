"""Classes whose fields and methods mean something to SMC, and modules that may keep the slot table.

Of a release that is not supported yet, what these classes have and the newest supported release has
not is listed, to be judged before the release becomes a supported one. SMC might accept a field of
server arguments or requests and ignore it; a method is answered by SGLang's default, which may be
wrong for SMC and says nothing. Defaults that are wrong, all of the newer releases, and what is
right:

- `BaseSpecWorker.weight_update_runners` has the draft, so that the target's weights would be loaded
  into it wherever an update names no `selector`. It has to be asked for by name.
- `SRTPlatform.get_kv_pool_cls` has the stock pool, which launches a Triton kernel as it is built.
  On a CPU: a subclass that does not.
- `SRTPlatform.supports_speculative_algorithm` is False: nothing but SMC runs on `smc_cpu`. True for
  what its attention can verify.

`capabilities` of a platform claims nothing, as is right for `smc_cpu`: no Triton, no graphs.
"""

FIELDS = (
    "sglang.srt.server_args.ServerArgs",
    "sglang.srt.managers.io_struct.GenerateReqInput",
    "sglang.srt.sampling.sampling_params.SamplingParams",
)
# Classes that ours derive from, and the one that brings new weights.
METHODS = (
    "sglang.srt.speculative.base_spec_worker.BaseSpecWorker",
    "sglang.srt.speculative.spec_registry.CustomSpecAlgo",
    "sglang.srt.speculative.spec_info.SpecInput",
    "sglang.srt.managers.overlap_utils.FutureMap",
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend",
    "sglang.srt.platforms.interface.SRTPlatform",
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager",
)

# The worker puts a larger `req_to_token` into the pool before attention backends are built, which
# keep the tensor. Whoever else keeps it may have the one from before, and read it without an error.
MAY_KEEP_TABLE = (
    "sglang.srt.layers.attention.",
    "sglang.srt.hardware_backend.npu.attention.",
    # Built before, and again by the worker (`upstream.refresh_tables`).
    "sglang.srt.mem_cache.kv_index_translator",
    # Built by the scheduler after the worker; reads it for mixed chunks alone.
    "sglang.srt.managers.overlap_utils",
)
