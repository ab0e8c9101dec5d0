"""`python -m graphkv demo`: a small model decodes real text through graphkv and is compared with its own forward.

Requests of unequal lengths join and leave a running batch. Every logit and every discrete choice of their whole lives
is recorded on the device and then judged by `graphkv.integrations.oracle`, which says what is compared with what.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from statistics import median

import numpy as np
import torch

from graphkv.config import CacheConfig
from graphkv.demo.meter import Meter
from graphkv.demo.model import LONGEST_PROMPT, Prompt, build_model, cut_prompts, read_text
from graphkv.demo.view import Progress, show_table
from graphkv.device import Device
from graphkv.errors import InvalidValue
from graphkv.integrations.oracle import Comparison, Reference
from graphkv.integrations.trace import RowRecord, Trace
from graphkv.integrations.transformers import TransformersModel
from graphkv.layout import IndexKFormat, LatentFormat
from graphkv.runtime import DecodeRuntime
from graphkv.sequence import Batch, Sequence
from graphkv.sizing import CacheSize

JOIN_EVERY = 4
"""Steps between two requests that join while the batch fills up."""

Tick = Callable[[int, int], None]
"""Told, after each step, how many tokens of how many are there."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What to run; see the command line's help."""

    model: str = "glm_moe_dsa"
    device: str = "auto"
    batch: int = 8
    new_tokens: int = 72
    latent: LatentFormat = LatentFormat.FP32
    index_k: IndexKFormat = IndexKFormat.FP32
    prompt_file: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch < 1 or self.new_tokens < 2:
            raise InvalidValue(
                f"batch must be at least 1 and new_tokens at least 2, got {self.batch} and {self.new_tokens}"
            )


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The facts of a run.

    Attributes:
        steps: decode steps. tokens: tokens added to all prompts.
        max_logit_error: largest difference to the model's own forward, explained ties followed, and its bound.
        free_logit_error: the same with the forward left alone; equal where there were no ties.
        topk_overlap: share of the forward's selections that the run shared, and the least that would pass.
        ties, unexplained: choices that differed and were, or were not, within the formats' precision.
        steady_allocations: allocations in all decode steps: graphkv's own, and on CUDA torch's, device and pinned.
        host_us_per_step: median time in `DecodeRuntime.step`; on the CPU device that is where the model runs.
        gpu_us_per_step: median time between events around the step, None on the CPU device.
        ok: the oracle's check held, every sampled token is its logits' likeliest, every step was one launch, and no
            step allocated.
    """

    device: str
    model: str
    transformers: str
    latent: str
    index_k: str
    steps: int
    tokens: int
    max_logit_error: float
    logit_error_bound: float
    free_logit_error: float
    topk_overlap: float
    topk_overlap_floor: float
    ties: int
    unexplained: int
    graph_launches_per_step: float
    steady_allocations: int
    host_us_per_step: float
    gpu_us_per_step: float | None
    blocks_total: int
    blocks_peak: int
    ok: bool


@dataclass(slots=True, eq=False)
class Request:
    """A prompt being continued, and in the end what was recorded of it."""

    prompt: Prompt
    sequence: Sequence
    sampled: int = 0
    record: RowRecord | None = None

    @property
    def fed(self) -> torch.Tensor:
        """int64 [S]: the tokens that the model was fed; the last sampled one was not."""
        return torch.from_numpy(self.sequence.tokens[:-1].astype(np.int64))

    @property
    def first_answer(self) -> int:
        return self.prompt.tokens.size - 1

    def samples_match(self) -> bool:
        """Whether no recorded logit beats that of the token which the runtime delivered, at any position."""
        assert self.record is not None
        logits = self.record.logits[self.first_answer :]
        sampled = torch.from_numpy(self.sequence.tokens[self.prompt.tokens.size :].astype(np.int64))
        return bool((logits.gather(1, sampled.unsqueeze(1)).squeeze(1) == logits.amax(1)).all())


class Session:
    """Requests that join and leave the batch of a runtime.

    Half a batch begins, one request joins every `JOIN_EVERY` steps until the batch is full, and then one whenever
    another leaves.

    Args:
        trace: what the runtime's model records to.
        prompts: the requests to come.
        batch: most requests at once.
    """

    def __init__(self, runtime: DecodeRuntime, trace: Trace, prompts: list[Prompt], batch: int) -> None:
        self.runtime, self.trace, self.batch = runtime, trace, batch
        self.meter = Meter(runtime)
        self.waiting = deque(prompts)
        self.active: list[Request] = []
        self.finished: list[Request] = []
        self.wanted = sum(prompt.new_tokens for prompt in prompts)
        self.steps = self.launches = 0
        self._room = (batch + 1) // 2

    @property
    def tokens(self) -> int:
        """Tokens that were added to all prompts so far."""
        return sum(request.sampled for request in (*self.active, *self.finished))

    def run(self, tick: Tick) -> None:
        """Serves every request."""
        launches = self.runtime.stats().graph_launches
        batch = Batch(())
        while self.waiting or self.active:
            if self.steps and self.steps % JOIN_EVERY == 0:
                self._room = min(self._room + 1, self.batch)
            if self._leave() | self._join():
                batch = Batch([request.sequence for request in self.active])
                if not len(batch):
                    continue
            step = self.meter.measure(lambda batch=batch: self.runtime.step(batch))  # type: ignore[misc]
            self.steps += 1
            for request in self.active:
                request.sampled += 1
            tick(self.tokens, self.wanted)
            self.runtime.retire(step - 1)  # one step stays in flight while the host prepares the next
        self.launches = self.runtime.stats().graph_launches - launches

    def _join(self) -> bool:
        joining: list[Request] = []
        while self.waiting and len(self.active) + len(joining) < self._room:
            prompt = self.waiting.popleft()
            joining.append(Request(prompt, self.runtime.open(prompt.tokens), sampled=1))
        if joining:
            self.runtime.prefill([request.sequence for request in joining])
            self.active += joining
        return bool(joining)

    def _leave(self) -> bool:
        leaving = [request for request in self.active if request.sampled >= request.prompt.new_tokens]
        if leaving:
            self.runtime.retire()
        for request in leaving:
            request.record = self.trace.take(request.sequence.row, request.sequence.length)
            self.runtime.close(request.sequence)
            self.active.remove(request)
            self.finished.append(request)
        return bool(leaving)


def run(options: DemoOptions, tick: Tick = lambda done, total: None) -> DemoReport:
    """Runs the demo; `tick` is told how many tokens of how many are there."""
    device = Device.of(options.device)
    model = build_model(options.model, seed=options.seed, device=device.torch)
    count = options.batch + (options.batch + 1) // 2
    prompts = cut_prompts(read_text(options.prompt_file), count, options.new_tokens, options.seed)
    longest = LONGEST_PROMPT + options.new_tokens
    trace = Trace(model, max_rows=options.batch, max_positions=longest)
    adapter = TransformersModel(model, max_rows=options.batch, observer=trace)
    config = adapter.cache_config(latent=options.latent, index_k=options.index_k)
    # Room for a whole batch of the longest, and for the blocks of those that have just left.
    num_blocks = 2 * options.batch * (CacheSize.of(config).blocks_for_tokens(longest) - 1) + 1
    with DecodeRuntime(
        config,
        adapter,
        device=device,
        max_rows=options.batch,
        max_seq_len=longest,
        num_blocks=num_blocks,
        prefix_caching=False,  # the choices of every token are judged, so every token is computed
    ) as runtime:
        session = Session(runtime, trace, prompts, options.batch)
        session.run(tick)
        runtime.check()
    return _report(options.model, session, *judge(model, config, session.finished))


def _report(name: str, session: Session, reference: Reference, found: Comparison) -> DemoReport:
    runtime, meter = session.runtime, session.meter
    stats = runtime.stats()
    per_step = session.launches / session.steps
    return DemoReport(
        device=runtime.device.name,
        model=name,
        transformers=metadata.version("transformers"),
        latent=str(runtime.config.latent),
        index_k=str(runtime.config.index_k),
        steps=session.steps,
        tokens=session.tokens,
        max_logit_error=found.error,
        logit_error_bound=reference.error_bound(found),
        free_logit_error=found.free_error,
        topk_overlap=found.overlap,
        topk_overlap_floor=reference.overlap_floor,
        ties=found.ties,
        unexplained=found.unexplained,
        graph_launches_per_step=per_step,
        steady_allocations=meter.allocations,
        host_us_per_step=median(meter.host_us),
        gpu_us_per_step=meter.gpu_us(),
        blocks_total=stats.blocks_total,
        blocks_peak=stats.blocks_peak,
        ok=(
            reference.held(found)
            and found.answers == session.tokens == session.wanted
            and all(request.samples_match() for request in session.finished)
            and per_step == 1
            and meter.allocations == 0
        ),
    )


def judge(model: torch.nn.Module, config: CacheConfig, finished: list[Request]) -> tuple[Reference, Comparison]:
    """Compares every finished request with the model's own forward."""
    reference, found = Reference(model, config), Comparison()
    for request in finished:
        assert request.record is not None
        found.add(reference.compare(request.fed, request.record, request.first_answer))
    return reference, found


@contextlib.contextmanager
def single_thread() -> Iterator[None]:
    """Inside, torch computes on one CPU thread: on layers this small, threads mostly wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def main(options: DemoOptions, *, as_json: bool) -> int:
    """Runs the demo with a progress bar, shows the table, and returns the exit code: 0 only if the check held."""
    with single_thread(), Progress("tokens") as progress:
        report = run(options, progress)
    facts = asdict(report)
    show_table(f"graphkv demo: {'ok' if report.ok else 'FAILED'}", facts)
    if as_json:
        print(json.dumps({name: None if _not_finite(value) else value for name, value in facts.items()}))
    return 0 if report.ok else 1


def _not_finite(value: object) -> bool:
    """JSON has no word for NaN, which a run that recorded nothing has for an error."""
    return isinstance(value, float) and not math.isfinite(value)
