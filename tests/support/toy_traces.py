"""Traces of rounds over toy languages, with all that can happen on the way."""

from typing import Any, NamedTuple

from msgspec.structs import replace
from toy_laws import EOS, languages, toy
from toy_request import ToyRequest
from toy_worker import ToyWorker
from trace_replay import read

from sglang_smc.state.stream import publish
from sglang_smc.state.trace import Trace

LENGTH = 24
SERVER = {"num_particles": 5, "num_steps": 4, "evidence_threshold": 0.5, "limit": LENGTH}
PAIR = languages(difference=1.2)
#: Of three tokens p has two, and the draft other two.
DYING = {"evidence_threshold": 0, "ess_threshold": 0.1}


class Told(NamedTuple):
    req: ToyRequest
    info: dict[str, Any]  # what its answer says

    @property
    def trace(self) -> Trace:
        return read(self.info)


def serve(
    num_requests: int, *chosen: dict[str, Any], retracts_behind: tuple[int, ...] = (), **more: Any
) -> list[Told]:
    """Serve requests, which choose in turn; all lose their particles behind some rounds."""
    given: dict[str, Any] = {"pair": PAIR, **SERVER, "chosen": chosen, **more}
    worker = toy(num_requests, **given)
    reqs = worker.begin(list(range(1, num_requests + 1)))
    num_rounds = 0
    while running := [req for req in reqs if not worker._is_over(req)]:
        if times := retracts_behind.count(num_rounds):
            begin_again(worker, running, times)
            running = [req for req in running if not worker._is_over(req)]
        num_rounds += 1
        if running:
            worker.step(running)
    worker.check_owned()
    return [Told(req, told(req)) for req in reqs]


def begin_again(worker: ToyWorker, reqs: list[ToyRequest], times: int) -> None:
    """Particles begin anew behind what was emitted, as after a retraction, with a token of 0."""
    rows = worker.tensor([req.row for req in reqs])
    for req in reqs * times:
        req.smc_state.begin(None, req.output_ids)
        req.say([0])
        req.kv_committed_len += 1
    evidence = [req.smc_state.counters[-1] for req in reqs]
    worker.worker._tables.particles.begin(
        rows,
        first_tokens=rows * 0,
        num_emitted=worker.tensor([len(req.output_ids) for req in reqs]),
        log_evidence=worker.tensor(evidence).double(),
        num_particles=worker.tensor([req.smc_state.config_now.num_particles for req in reqs]),
    )


def told(req: ToyRequest) -> dict[str, Any]:
    req.finished = lambda: True  # type: ignore[method-assign]
    publish(req)  # type: ignore[arg-type]
    return {name: values[-1] for name, values in req.customized_info.items()}


def a_trace(num_particles: int = 4, length: int = 60) -> Trace:
    """Return one answer's, with a text for each token; that of the last ends a script."""
    server = {"num_particles": num_particles, "limit": length, "eos": -1}
    (one,) = serve(1, {"trace": True, "evidence_threshold": 0}, **server)
    return replace(one.trace, pieces={"0": " w0", "1": " w1", str(EOS): "</script>"})
