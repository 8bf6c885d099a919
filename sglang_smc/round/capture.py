"""Capture a server's rounds when it starts, as far as memory allows."""

from typing import NamedTuple

import torch
from sglang.srt.distributed.parallel_state import GroupCoordinator

from sglang_smc.models.recorder import Ranks, Record, cuda_session
from sglang_smc.options.server import SMCConfig
from sglang_smc.proposers.layer_choice import LayerChoice, PassClock
from sglang_smc.proposers.layer_trials import trials
from sglang_smc.round import graph
from sglang_smc.round.batch import Tables
from sglang_smc.round.play import ServedRound
from sglang_smc.upstream import Arguments


class Captures(NamedTuple):
    """Captured rounds of a server, and what they take."""

    recordings: graph.Recordings | None = None  # None: all rounds are launched call by call
    launched: int | None = None  # the most requests of a round without a graph; None: any number
    gigabytes: float = 0.0  # of 2^30 bytes
    seconds: float = 0.0


class Server(NamedTuple):
    """Hold what rounds are captured of."""

    round: ServedRound
    tables: Tables
    config: SMCConfig
    sizes: list[int]  # batch sizes to capture, ascending
    device: str

    def capture(self, group: GroupCoordinator) -> Captures:
        """Capture rounds, and bound the size of those launched without a graph by memory.

        Every rank of ``group``, which shares the models, must call it.
        """
        captures = self.config.round_graph != "off"
        if captures:
            self.choose_layers()
        ranks = Ranks.of(group, self.device)  # without the passes of trials
        if captures:
            try:
                return self._capture_what_fits(ranks)
            except Exception as error:
                graph.explain_failure(error, self.config, ranks, self.device)
        vocab_size = self.tables.requests.vocab_size
        free = ranks.free_bytes
        room = graph.room_of(self.config, vocab_size, free, records=False)
        return Captures(launched=room.launched)

    def choose_layers(self) -> None:
        """Choose which passes of the draft run by fused layers, where the server is to choose.

        Where a trial fails, SGLang's layers run all of them. Raises ValueError if it has stopped
        the device.
        """
        choice = self.round.draft.layer_choice
        if choice is None or not choice.is_open:
            return
        try:
            self._try_layers(choice)
        except Exception as error:  # of a compiler, a driver or a kernel, or out of memory
            choice.leave(f"a trial raises {type(error).__name__}: {error}")
            if not graph.works(self.device):
                raise ValueError(
                    f"A trial of --speculative-smc-draft-layers auto has stopped the device "
                    f"{self.device}: {type(error).__name__}: {error}. Pass sglang, which tries "
                    "none."
                ) from error

    def _try_layers(self, choice: LayerChoice) -> None:
        from sglang_smc.ops.triton_ops import in_order

        with cuda_session(self.device) as session:
            passes = trials(
                choice,
                self.round.draft,
                self.tables.ledger,
                self.sizes,
                self.tables.requests.vocab_size,
                record=session.record,
                in_order=in_order,
            )
            choice.make(passes, PassClock(torch.get_device_module(self.device).synchronize))

    def _capture_what_fits(self, ranks: Ranks) -> Captures:
        """Capture rounds; if memory runs out, start again with a smaller part of it.

        With several ranks the error is raised, since the others would wait in the aborted round.
        """
        for part in (1.0, 0.75, 0.5, 0.25):
            try:
                return self._capture_within(part, ranks)
            except torch.OutOfMemoryError:
                if ranks.count > 1:
                    raise
        return self._capture_within(0.1, ranks)

    def _capture_within(self, part: float, ranks: Ranks) -> Captures:
        within = ranks._replace(free_bytes=int(part * ranks.free_bytes))
        with cuda_session(self.device) as session:
            recordings = self.record(session.record, within)
        gigabytes, seconds = session.usage(recordings.describe(self.sizes))
        return Captures(recordings, recordings.launched, gigabytes, seconds)

    def record(self, record: Record, ranks: Ranks) -> graph.Recordings:
        """Capture rounds; unused groups of a batch run on SGLang's padding row."""
        play = self.round.play
        config = self.config
        device = self.device
        recordings = graph.record_rounds(
            play, config, self.sizes, self.tables, device, record, ranks
        )
        self.round.record_passes(record, config, recordings.sizes.of_passes, device)
        return recordings


def graph_sizes(server_args: Arguments) -> list[int]:
    """Return the batch sizes to capture: SGLang's own, up to the most requests that can run."""
    graphs = server_args.cuda_graph_config
    largest = server_args.max_running_requests
    assert graphs is not None and largest is not None
    sizes = graphs.decode.bs or [1 << i for i in range(largest.bit_length() + 1)]
    return sorted({min(size, largest) for size in sizes})
