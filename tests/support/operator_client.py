"""What an operator asks of a running server, and long answers to ask it under."""

import base64
import itertools
import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import torch
from http_server import Server
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from safetensors.torch import load_file

from sglang_smc import upstream
from sglang_smc.options.server import CPU_OVERLAP_ENV
from sglang_smc.state.metrics import PREFIX
from sglang_smc_tools.demo.serving import free_port

SETTINGS = {"num_particles": 4, "num_steps": 3, "max_lag": 32, "decode_log_interval": 5}
# As on a GPU: a round is in flight when the scheduler is told something.
OVERLAPPED = {CPU_OVERLAP_ENV: "1"}
LONG = 220
MODES = ({}, {"mode": "exact"}, {"mode": "auto"}, {"num_particles": 2, "resample_at": "token"})
DASHBOARD = Path(__file__).parents[2] / "examples/grafana/dashboards/sglang-smc.json"
PAGE = DASHBOARD.parents[3] / "docs/operations.md"
GROUP = "new weights"
NUMBERS = itertools.count()


class Models(NamedTuple):
    """Two pairs of checkpoints, alike in all but their weights, and a draft of another size."""

    target: str
    draft: str
    new_target: str
    new_draft: str
    other_size: str


class Fresh(NamedTuple):
    """Texts of a server that has the new weights from the start, and how it ends at SIGTERM."""

    texts: list[str]
    greedy: str  # in mode `exact`
    last_tokens: int  # of a request that was running
    last_reason: str
    health: int  # the status of /health meanwhile
    returncode: int
    num_processes: tuple[int, int]  # before and after


def body(seeds: Sequence[int], tokens: int, smc: Sequence[dict[str, Any]]) -> dict[str, Any]:
    own = {"max_new_tokens": tokens, "ignore_eos": True}
    params = [
        {**own, "sampling_seed": seed, "custom_params": {"smc": chosen}}
        for seed, chosen in zip(seeds, smc, strict=True)
    ]
    return {"input_ids": [[3, 4, 5 + seed] for seed in seeds], "sampling_params": params}


class Stream:
    """A long answer, read as far as a test wants."""

    def __init__(self, chunks: Iterator[dict[str, Any]], rid: str) -> None:
        self.rid = rid
        self._chunks = chunks
        self.last = self.next()

    def next(self) -> dict[str, Any]:
        return next(self._chunks, {})

    def finish(self) -> dict[str, Any]:
        while chunk := self.next():
            self.last = chunk
        return self.last


class Operator(Server):
    """A running server, and what its operator asks of it."""

    def answers(self) -> list[dict[str, Any]]:
        """Answers that follow from seeds and weights alone, in all modes."""
        answer = self.post("/generate", **body(range(len(MODES)), 40, MODES))
        assert answer.status_code == 200, answer.text
        return answer.json()

    def texts(self) -> list[str]:
        return [answer["text"] for answer in self.answers()]

    def greedy(self) -> tuple[str, int]:
        """A text of the target, and how many rounds it took."""
        given = body([0], 40, [{"mode": "exact"}])
        given["sampling_params"][0]["temperature"] = 0
        (answer,) = self.post("/generate", **given).json()
        return answer["text"], answer["meta_info"]["spec_smc_rounds_ct"]

    @contextmanager
    def streaming(self, seed: int = 9) -> Iterator[Stream]:
        """A request whose first tokens have come, and most have not."""
        # Never the same again: SGLang aborts a stream's rid once more, seconds after its end.
        rid = f"stream-{next(NUMBERS)}"
        with self.stream(**body([seed], LONG, [{}]), rid=[rid]) as chunks:
            stream = Stream(chunks, rid)
            assert stream.last["meta_info"]["completion_tokens"] < LONG
            yield stream

    def smc_state(self) -> dict[str, Any]:
        return self.get("/server_info").json()["internal_states"][0]["smc"]

    def samples(self) -> list[Sample]:
        families = text_string_to_metric_families(self.get("/metrics").text)
        return [sample for family in families for sample in family.samples]

    def metrics(self) -> dict[str, float]:
        """SMC's metrics by name, buckets aside."""
        return {
            sample.name.removeprefix(PREFIX): sample.value
            for sample in self.samples()
            if sample.name.startswith(PREFIX) and "le" not in sample.labels
        }

    def assert_paused(self) -> None:
        rounds = self.smc_state()["since_start"]["rounds"]
        time.sleep(0.2)
        assert self.smc_state()["since_start"]["rounds"] == rounds

    def load(self, target: str, draft: str | None = None, **given: Any) -> httpx.Response:
        manifest = {"draft_model_path": draft} if draft else None
        own = {"model_path": target, "manifest": manifest}
        return self.post("/update_weights_from_disk", **own, **given)

    @contextmanager
    def session(self) -> Iterator[None]:
        """For new weights by any way but from disk, on SGLang that wants one."""
        if not upstream.SELECTS_MODELS:
            yield
            return
        assert self.post("/begin_weight_update", selector="all").status_code == 200
        try:
            yield
        finally:
            assert self.post("/end_weight_update").status_code == 200

    def send(
        self, tensors: Iterable[tuple[str, torch.Tensor]] | bytes, **given: Any
    ) -> httpx.Response:
        """Tensors by name, or serialized; a test that sends them shares them `by_file_name`."""
        from sglang.srt.utils import MultiprocessingSerializer

        if not isinstance(tensors, bytes):
            tensors = MultiprocessingSerializer.serialize(list(tensors))
        sent = base64.b64encode(tensors).decode()
        return self.post("/update_weights_from_tensor", serialized_named_tensors=[sent], **given)

    def checksums(self) -> dict[str, str]:
        """Of each tensor; the names of the draft's begin with ``draft.``."""
        answer = self.post("/weights_checker", action="checksum")
        assert answer.status_code == 200, answer.text
        (rank,) = answer.json()["ranks"]
        return rank["checksums"]

    @contextmanager
    def broadcasting(self) -> Iterator[Any]:
        """A process group of this process, as rank 0, and the server."""
        from sglang.srt.utils import init_custom_process_group

        port = free_port()
        own = {"world_size": 2, "group_name": GROUP, "backend": "gloo"}
        theirs = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1}
        with ThreadPoolExecutor(1) as pool:
            union = pool.submit(self.post, "/init_weights_update_group", **own, **theirs)
            place = {"init_method": f"tcp://127.0.0.1:{port}", "rank": 0}
            group = init_custom_process_group(**own, **place, timeout=timedelta(minutes=10))
            assert union.result().status_code == 200, union.result().text
        yield group
        assert self.post("/destroy_weights_update_group", group_name=GROUP).status_code == 200
        torch.distributed.destroy_process_group(group)


def queries_of_dashboard() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return [query.replace("$__rate_interval", "2m").replace("$model", ".*") for query in asked]


def queries_of_page() -> list[str]:
    """What the page on operation asks, remarks aside."""
    blocks = re.findall(r"```promql\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [line.split(" # ")[0].strip() for block in blocks for line in block.splitlines()]


def tensors_of(folder: str) -> dict[str, Any]:
    (file,) = Path(folder).glob("*.safetensors")
    return load_file(file)
