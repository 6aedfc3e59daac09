"""The same step, captured whole as a CUDA graph: drafts, the target's pass, verification and commit; nobody waits.

Lengths, ids and step numbers live on the device. The host reads what came out one step late and chooses the next arm
from what has arrived; what was drafted beyond a row's end is dropped. It leaves out the drafters' side (lanes.py).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

import torch

from flashspec_core.engine.fused import FusedModel, why_not
from flashspec_core.engine.lanes import gathered, lane_kind, places
from flashspec_core.noise import DraftNoise, log_uniforms, step_seeds
from flashspec_core.records import Draft
from flashspec_core.verify import decide, kernels

AHEAD = 2  # steps that are on their way at most
STRIDES = (8, 64, 512)  # ids a row that a pass over many reads
MANY = 4096  # ids of all rows: a pass over more takes as long as its arithmetic, and not as its weights
STATIONS = 8  # kept a target: each holds a cache and its graphs
LANES = 8  # drafters that a station keeps
LONG = 64  # ids that a row must still want, that going on with fewer rows pays
_CAPTURING = threading.Lock()  # a capture's begin empties PyTorch's cache, and few streams are handed out, in turn


def why_eager(run) -> str | None:
    """What keeps a call from captured steps. Args: run: a decode.Run. Returns: None, or the reason, readable."""
    options = run.options
    asked = [name for name in ("logits_processor", "logprobs", "trace") if getattr(options, name)]
    if asked:
        return f"{' and '.join(asked)} asked for"
    if run.keeps_cache:
        return "a chat keeps its cache"
    if reason := why_not(run.target.model):
        return reason
    for arm in run.arms:
        if arm.drafter is not None and isinstance(kind := lane_kind(arm.drafter, run.target), str):
            return kind
    here = run.target.device.type == "cuda" or kernels.INTERPRETED
    return None if here else "no CUDA device"


class Station:
    """Buffers of one batch and capacity, and the steps that were captured on them.

    Args:
        target: what `load_target` returns.
        batch, capacity: rows, and ids that each may hold.
        layers: the target's layers whose outputs are kept for draft heads.
    """

    def __init__(self, target, batch: int, capacity: int, layers=()):
        self.target, self.batch, self.capacity = target, batch, capacity
        self.key = batch, capacity, tuple(layers)
        self.fused, device = FusedModel(target.model), target.device
        self.cache = self.fused.new_cache(batch, capacity)
        size = target.model.config.get_text_config().hidden_size
        self.states = {layer: torch.zeros(batch, capacity, size, dtype=target.dtype, device=device) for layer in layers}
        whole = dict(dtype=torch.int64, device=device)
        self.tokens, self.lengths = torch.zeros(batch, capacity, **whole), torch.ones(batch, **whole)
        self.seeds, self.read = torch.zeros(batch, **whole), torch.zeros(batch, **whole)
        self.step = torch.zeros(1, **whole)
        self.longest = 1
        self.lanes, self.graphs, self.workspaces = {}, {}, {}
        self.samplings, self.method = [], "token"

    def begin(self, run, rows, old=None, kept=()):
        """Take up rows, and read their prompts.

        Args:
            run: a decode.Run.
            rows: its rows, `batch` of them.
            old: the Station that they were on, or None: nothing of them was read.
            kept: their places there.
        """
        self.samplings, self.method = [row.sampling for row in rows], run.options.method
        for held in (self, *self.lanes.values()):
            for workspace in held.workspaces.values():
                workspace.prepare(self.samplings)
        self.tokens.copy_(torch.tensor([row.ids + [0] * (self.capacity - len(row.ids)) for row in rows]))
        self.lengths.copy_(torch.tensor([len(row.ids) for row in rows]))
        self.seeds.copy_(torch.tensor([row.seed for row in rows]))
        self.step.fill_(run.num_steps)
        self.longest = max(len(row.ids) for row in rows)
        for lane in self.lanes.values():
            lane.read.zero_()
            lane.behind = self.longest
        if old is None:
            self.read.zero_()
            self._catch_up("target", self._read_on, self.longest - 1)
            return
        pairs = list(zip(old.cache.keys + old.cache.values, self.cache.keys + self.cache.values, strict=True))
        pairs += [(old.states[layer][:, None], own[:, None]) for layer, own in self.states.items()]
        kept = torch.tensor(kept, device=self.lengths.device)
        for source, own in pairs:
            own[:, :, : self.longest] = source[kept, :, : self.longest]

    def _read_on(self, stride: int):
        """The target reads `stride` ids a row."""
        _, seen = self.fused.states(gathered(self.tokens, self.read, stride), self.read, self.cache, self.states)
        self._keep(seen, self.read)
        self.read += stride

    def _keep(self, seen, starts):
        for layer, state in seen.items():
            at = places(starts, state.shape[1], self.capacity)
            self.states[layer].scatter_(1, at[..., None].expand_as(state), state)

    def _catch_up(self, name, function, missing: int):
        """Passes of many ids until nothing is missing; what they read beyond that is overwritten."""
        few, some, many = STRIDES
        while missing > 0:
            wide = missing >= many or (missing > 2 * some and self.batch * many <= MANY)
            stride = many if wide else few if missing <= few else some
            self.replay(("catch up", name, stride), lambda s=stride: function(s))
            missing -= stride

    def lane(self, drafter):
        """The drafter's side of the step, made at its first call."""
        if drafter is None:
            return None
        key = id(drafter)
        if key not in self.lanes:
            if len(self.lanes) >= LANES:
                gone = next(iter(self.lanes))
                del self.lanes[gone]
                self.graphs = {name: graph for name, graph in self.graphs.items() if gone not in name}
            with torch.inference_mode(False):
                self.lanes[key] = lane_kind(drafter, self.target)(drafter, self)
        self.lanes[key] = self.lanes.pop(key)  # the latest stands last
        return self.lanes[key]

    def free(self):
        """Let go of caches and graphs at once, and not when Python finds the circle."""
        self.lanes.clear()
        self.graphs.clear()

    def _step(self, lane, gamma: int):
        """One step on the buffers. Returns: [batch, gamma + 5] int64: accepted, next, invalid, emitted ids, drafted."""
        seeds, positions, log_u = self.seeds, None, None
        if self.method == "coupled":
            positions = self.lengths
        elif not all(s.greedy for s in self.samplings):
            seeds, log_u = self._noise(gamma)
        draft = Draft(self.tokens.new_empty(self.batch, 0))
        if lane is not None:
            draft = lane.draft(gamma, self.samplings, DraftNoise(seeds, positions))
        width = draft.token_ids.shape[1]
        last = self.tokens.gather(1, self.lengths[:, None] - 1)
        token_ids = torch.cat([last, draft.token_ids.clamp_min(0)], 1)
        states, seen = self.fused.states(token_ids, self.lengths - 1, self.cache, self.states)
        self._keep(seen, self.lengths - 1)
        logits = self.fused.logits(states)
        unread = log_u is None
        log_u = logits.new_zeros(self.batch, width, dtype=torch.float32) if unread else log_u[:, :width].contiguous()
        result = decide(logits, draft, self.samplings, log_u, seeds, positions, self.method, None, self.workspaces)
        self.tokens.scatter_(1, places(self.lengths, width + 1, self.capacity), result.token_ids.clamp_min(0))
        before, emitted = self.lengths.clone(), result.num_accepted + 1
        self.lengths.copy_((before + emitted).clamp_max(self.capacity - width - 1))
        if lane is not None:
            lane.after(before, self.lengths)
        self.step += 1
        out = [result.num_accepted, result.next_token_ids, result.invalid]
        drafted = (draft.token_ids >= 0).sum(1, keepdim=True)
        return torch.cat([torch.stack(out, 1), result.token_ids, drafted], 1)

    def _noise(self, gamma: int):
        if self.seeds.is_cuda:
            return kernels.step_noise(self.seeds, self.step, gamma)
        seeds = step_seeds(self.seeds, self.step)
        return seeds, log_uniforms(seeds, gamma)

    def advance(self, arm):
        """One step of an arm, sent on its way. Args: arm: an Arm. Returns: its record on the device, see _step."""
        lane, gamma = self.lane(arm.drafter), arm.gamma if arm.drafter is not None else 0
        if lane is not None:
            self._catch_up(id(arm.drafter), lane.catch_up, lane.behind - lane.first(gamma))
        law = all(s.greedy for s in self.samplings), kernels.filters(self.samplings), self.method
        out = self.replay((id(arm.drafter), gamma, law), lambda: self._step(lane, gamma))
        self.longest += gamma + 1
        for other in self.lanes.values():
            other.behind = other.first(gamma) if other is lane else other.behind + gamma + 1
        return out

    def replay(self, key, function):
        """A captured function once more; captured at its first call, where there is a CUDA device.

        Args: key: its name; function: without arguments, on the buffers.
        """
        if self.target.device.type != "cuda":
            return function()
        if key not in self.graphs:
            moved = [self.lengths, self.step, self.read, *(lane.read for lane in self.lanes.values())]
            before = [t.clone() for t in moved]
            with _CAPTURING:
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    function()  # kernels are compiled, libraries take their buffers
                torch.cuda.current_stream().wait_stream(stream)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may go on
                    out = function()
            self.graphs[key] = graph, out
            for tensor, old in zip(moved, before, strict=True):
                tensor.copy_(old)
        graph, out = self.graphs[key]
        graph.replay()
        return out


@dataclass
class Flight:
    """A step on its way.

    Args:
        arm, told: what was chosen, and what the policy was told.
        record: see Station._step; in pinned memory.
        first: it was captured just now, or is the first behind a prompt: its time says nothing of the arm.
        times: when it set out and ended, CUDA events or seconds.
        copied: the event behind the record's copy, or None.
    """

    arm: int
    told: object
    record: torch.Tensor
    first: bool
    times: tuple
    copied: object = None

    def arrived(self) -> bool:
        """Whether the record can be read; asks, and does not wait."""
        return self.copied is None or self.copied.query()

    def seconds(self) -> float:
        """What the step took, on the device."""
        start, end = self.times
        return end - start if self.copied is None else start.elapsed_time(end) * 1e-3


def station_for(run, rows) -> Station:
    """The buffers for these rows, taken from those that are kept; two calls never share one.

    Args: run: a decode.Run; rows: of it.
    """
    most = max([arm.gamma for arm in run.arms if arm.drafter is not None], default=0)
    needed = max(row.end for row in rows) + (AHEAD + 1) * (most + 1)
    key = len(rows), max(512, 1 << (needed - 1).bit_length()), tuple(sorted(run.layers))
    if (kept := run.target.stations.pop(key, None)) is not None:
        return kept
    with torch.inference_mode(False):  # buffers outlive the caller's mode
        return Station(run.target, *key)


def give_back(run, station):
    """Keep a station for later calls. Args: run: a decode.Run; station: that it does not use any more."""
    kept = run.target.stations
    for old in [kept.pop(station.key, None), kept.pop(next(iter(kept)), None) if len(kept) >= STATIONS else None]:
        if old is not None:
            old.free()
    kept[station.key] = station


def steps(run, rows):
    """Yield each step's DecodeSteps, one a row, until every row has ended. Args: run: a decode.Run; rows: of it."""
    station, kept = None, ()
    try:
        while rows:
            old, station = station, station_for(run, rows)
            station.begin(run, rows, old, kept)
            if old is not None:
                give_back(run, old)
            flights, first = deque(), True
            while True:
                alive = [i for i, row in enumerate(rows) if row.finish_reason is None]
                wanted = max([rows[i].end - len(rows[i].ids) for i in alive], default=0)
                fewer = 2 * len(alive) <= len(rows) and wanted >= LONG  # it pays to go on with those alone
                ahead = min(AHEAD, wanted, max(1, len(flights) + getattr(run.policy, "left", AHEAD)))
                if not fewer and len(flights) < ahead:
                    flights.append(_send(run, station, [rows[i] for i in alive], first))
                    first = False
                    continue
                if not flights:
                    break
                flight = flights.popleft()
                while not flight.arrived():
                    time.sleep(0)  # other threads may go on
                if alive:
                    learns = not flight.first
                    yield run.take(rows, flight.arm, flight.record.tolist(), flight.seconds(), learns, flight.told)
            rows, kept = [rows[i] for i in alive], alive
    finally:
        if station is not None:
            give_back(run, station)


def _send(run, station, rows, first: bool) -> Flight:
    arm_index, told = run.choose(rows)
    captured = len(station.graphs)
    if station.target.device.type != "cuda":
        start = time.perf_counter()
        out = station.advance(run.arms[arm_index])
        return Flight(arm_index, told, out, first, (start, time.perf_counter()))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    out = station.advance(run.arms[arm_index])
    end.record()
    record = torch.empty(out.shape, dtype=out.dtype, pin_memory=True)
    record.copy_(out, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return Flight(arm_index, told, record, first or len(station.graphs) > captured, (start, end), copied)
