"""Decode the particles of a response as SGLang decodes its answer, and the tokens of its trace."""

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sglang_smc.server.routes import PARTICLES, TRACE
from sglang_smc.state.stream import DETOKENIZATION
from sglang_smc.upstream import resolved, tool_close_tokens


class ParticleTexts(DetokenizerManager):
    """SGLang's detokenizer, in the process of the tokenizer manager, for texts beside answers."""

    def __init__(self, manager: TokenizerManager) -> None:
        """Take the manager's tokenizer; SGLang's own detokenizer opens sockets."""
        server_args = resolved(manager.server_args)
        tokenizer: Any = manager.tokenizer
        self.tokenizer = tokenizer
        try:
            self.vocab_size = len(tokenizer)
        except TypeError:  # as SGLang's own has it
            self.vocab_size = None
        self.decode_status = {}  # pyright: ignore[reportAttributeAccessIssue] -- all texts are whole
        self.disable_tokenizer_batch_decode = server_args.disable_tokenizer_batch_decode
        self.is_tool_call_parser_gpt_oss = server_args.tool_call_parser == "gpt-oss"
        self.tool_close_token_ids = tool_close_tokens(server_args.tool_call_parser, tokenizer)

    def texts(
        self, particles: list[dict[str, Any]], *, before: list[int], **asked: Any
    ) -> list[str]:
        """Return the texts of answers with the particles' tokens.

        Args:
            before: the end of the prompt.
            asked: the other fields of `state.stream.detokenization`.
        """
        size = len(particles)
        ended: Any = SimpleNamespace(
            rids=list(map(str, range(size))),
            decoded_texts=[""] * size,
            decode_ids=[before + one["output_ids"] for one in particles],
            read_offsets=[len(before)] * size,
            # One that nothing has ended is whole, too.
            finished_reasons=[one["finish_reason"] or {"matched": None} for one in particles],
            **{name: [value] * size for name, value in asked.items()},
        )
        return self._decode_batch_token_id_output(ended)


def add_texts(meta_info: dict[str, Any], manager: TokenizerManager) -> None:
    """Decode the particles of a response as answers are, and each token of its trace by itself."""
    asked = meta_info.pop(DETOKENIZATION, None)
    tokenizer: Any = manager.tokenizer
    if tokenizer is None:
        return
    if particles := meta_info.get(PARTICLES):
        found = ParticleTexts(manager).texts(particles, **asked)
        for particle, text in zip(particles, found, strict=True):
            particle["text"] = text
    trace = meta_info.get(TRACE)
    if trace and "pieces" not in trace:  # SGLang processes the end of a stream twice
        ids = sorted(_tokens_of(trace["rounds"]) | set(trace.get("emitted_after") or ()))
        trace["pieces"] = {str(one): tokenizer.decode([one]) for one in ids}


def _tokens_of(rounds: Iterable[Mapping[str, Any]]) -> set[int]:
    """Return all tokens in a trace's rounds."""
    found: set[int] = set()
    for one in rounds:
        found.update(one.get("emitted_before") or (), one.get("begins") or ())
        found.update(one["emitted"], *one["drafted"])
        found.update(token for token in one["bonus"] if token is not None)
    return found
