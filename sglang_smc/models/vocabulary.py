"""The check that target and draft speak of the same tokens: SGLang's own, for STANDALONE."""

from types import SimpleNamespace

from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.speculative.standalone_worker_v2 import StandaloneWorkerV2


def check_same_vocabulary(target_worker: TpModelWorker, draft_worker: TpModelWorker) -> None:
    """Raise SGLang's ValueError where the vocabularies differ in size or in any token."""
    # The method reads nothing of its worker but these two attributes of the draft's.
    standalone = SimpleNamespace(
        _draft_worker=SimpleNamespace(
            draft_runner=draft_worker.model_runner, draft_worker=draft_worker
        )
    )
    StandaloneWorkerV2._validate_vocab_compatibility(
        standalone,  # type: ignore[arg-type]
        target_vocab_size=target_worker.model_runner.model_config.vocab_size,
        target_tokenizer=target_worker.tokenizer,
    )
