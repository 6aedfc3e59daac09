"""Verification on the device, launched: equal to reference.py under every method, without a host wait.

A Workspace keeps the buffers of a shape. The kernels stand in kernel_step.py, what they do to a row in kernel_parts.py.
"""

from __future__ import annotations

import math

import torch
import triton

from flashspec_core.noise import COUPLED, DRAFT, RECOVER
from flashspec_core.records import Draft, VerifyResult
from flashspec_core.verify import METHODS
from flashspec_core.verify.kernel_step import _floors_kernel, _noise_kernel, _verify_kernel

PER_CORE = 4  # programs a multiprocessor
LANES = 128  # threads of a program, each with eight ids of every tile
TILE = 8 * LANES
RUN, RUNS = 8, 16  # tiles that one bound of a thread covers, as long as these are the runs of a part, at most
WHOLE = 2  # tiles of a part that a race reads whole, at most: bounds would cost more than they spare
FEW = 16  # bounded lanes that a race reads at a time
REGISTERS = 65_536 // (PER_CORE * LANES)  # of a thread, so that these programs run side by side
HELD = 14  # bytes of an id in all rows, at most, that so few registers hold and spill next to nothing
VOCABULARIES = 16  # of drafts that a workspace remembers
INTERPRETED = triton.knobs.runtime.interpret  # its programs run one after another, so none may wait for the next
_SKIP = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # low bits of a float32 that the dtype lacks


class Workspace:
    """Buffers that are kept between calls of one shape, so that a call allocates nothing; for one stream at a time.

    Args: batch, gamma, vocab, device: of the logits.
    Raises: ValueError: the device is not the current one, where Triton launches.
    """

    def __init__(self, batch: int, gamma: int, vocab: int, device):
        if device.type == "cuda" and device.index != (current := torch.cuda.current_device()):
            raise ValueError(f"expected the current CUDA device, {current}, got {device}: torch.cuda.set_device first")
        self.shape = batch, gamma, vocab
        cores = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
        self.part, self.splits, self.run, self.bounded = shares(batch, vocab, cores)
        self.compiled = {}
        self.width, rows = triton.next_power_of_2(gamma + 1), 2 * gamma + 2
        self.parts = torch.empty(batch, 4, rows, self.splits, device=device)
        self.winners = torch.empty(batch, rows, self.splits, dtype=torch.int32, device=device)
        self.bounds = torch.empty(batch, gamma + 1, self.splits, self.bounded, device=device)
        self.state = torch.zeros(batch, 4, dtype=torch.int32, device=device)
        self.floors = torch.empty(batch, rows - 1, device=device)
        self.out = torch.empty(batch, gamma + 4, dtype=torch.int64, device=device)
        self.logs = torch.zeros(batch, 3, gamma + 1, device=device)
        self.laws = torch.empty(batch, 5, device=device)
        self.samplings, self.inverses = None, {}
        accepted, following, invalid, ids = self.out[:, 0], self.out[:, 1], self.out[:, 2], self.out[:, 3:]
        logprobs = self.logs[:, 0, :-1], self.logs[:, 1, :-1]
        self.result = VerifyResult(accepted, following, ids, *logprobs, invalid, "triton")

    def prepare(self, samplings):
        """Take the rows' laws to the device, when they change. Args: samplings: list of one Sampling a row."""
        if samplings != self.samplings:
            vocab = self.shape[2]
            self.samplings = list(samplings)
            laws = []
            for s in samplings:
                scale = 0 if s.greedy else max(1 / s.temperature, 2.0**-125)
                log_min_p = math.log(s.min_p) if s.min_p else -math.inf
                laws.append((scale, s.temperature, s.top_k or vocab, s.top_p or 1, log_min_p))
            self.laws.copy_(torch.tensor(laws, dtype=torch.float32), non_blocking=True)  # in place: graphs read it
            self.filtered = filters(samplings)

    def inverse(self, vocab_ids):
        """Where each target id stands in a draft's vocabulary; kept, since a captured step reads it again.

        Args: vocab_ids: [draft_vocab] int64, or None: not read.
        Returns: [vocab] int32, -1: nowhere.
        """
        if vocab_ids is None:
            return self.winners
        if id(vocab_ids) not in self.inverses:
            if len(self.inverses) >= VOCABULARIES:
                self.inverses.pop(next(iter(self.inverses)))
            table = torch.full((self.shape[2],), -1, dtype=torch.int32, device=self.out.device)
            table[vocab_ids] = torch.arange(len(vocab_ids), dtype=torch.int32, device=self.out.device)
            self.inverses[id(vocab_ids)] = vocab_ids, table
        return self.inverses[id(vocab_ids)][1]


def shares(batch: int, vocab: int, cores: int) -> tuple[int, int, int, int]:
    """How the programs share a sequence; all of its parts must run at once.

    Args: batch, vocab: of the logits; cores: multiprocessors.
    Returns: ids of a part; parts; tiles of a run; lanes of a part that have a bound, 0 where it is read whole.
    """
    tiles = triton.cdiv(vocab, TILE)
    wanted = max(1, min(tiles, PER_CORE * cores // batch, cores, 128))
    own = triton.cdiv(tiles, wanted)
    if own <= WHOLE:
        return own * TILE, triton.cdiv(tiles, own), triton.next_power_of_2(own), 0
    run = min(triton.next_power_of_2(own), max(RUN, triton.next_power_of_2(triton.cdiv(own, RUNS))))
    return own * TILE, triton.cdiv(tiles, own), run, LANES * triton.next_power_of_2(triton.cdiv(own, run))


def filters(samplings) -> bool:
    """Whether some row's law has a filter. Args: samplings: list of Samplings."""
    return any(not s.greedy and (s.top_k is not None or s.min_p or (s.top_p or 1) < 1) for s in samplings)


def verify(target_logits, draft, samplings, log_uniforms, seeds, positions=None, method="token", workspaces=None):
    """Any method and greedy rows on the device; equals reference.py.

    Args:
        target_logits, draft, samplings, log_uniforms, seeds, positions, method: see verify.decide.
        workspaces: a dict that keeps the buffers of each shape; the result then shares them and stands until the next
            call. None: new ones.
    Returns: VerifyResult.
    Limits: float32. A log-probability is good to 1e-7 of the largest |logit| / temperature, which is to lie below 1e9.
    Cost: one launch, two where a row filters, and no host wait; reads the target once (the draft only without its
        log-sum-exp), then little of one target and one draft row a sequence, all of it where parts are small; "block"
        reads both twice.
    """
    purpose = COUPLED if method == "coupled" else RECOVER
    return _launch(target_logits, draft, samplings, log_uniforms, seeds, positions, method, purpose, workspaces).result


def step_noise(row_seeds, step, gamma: int):
    """noise.step_seeds and noise.log_uniforms of a step whose number is on the device, in three launches.

    Args: row_seeds: [batch] int64; step: [1] int64; gamma: drafted tokens.
    Returns: [batch] int64; [batch, gamma] float32.
    """
    row_seeds = row_seeds.contiguous()
    seeds, bits = torch.empty_like(row_seeds), torch.empty(len(row_seeds), gamma, device=row_seeds.device)
    _noise_kernel[(len(row_seeds),)](row_seeds, step, seeds, bits, gamma, triton.next_power_of_2(max(1, gamma)))
    return seeds, (bits * 2.0**-24).log()


def draw(logits, samplings, noise, index: int, workspaces=None):
    """A drafter's tokens and what their laws sum to, in one launch; see verify.draw_draft.

    Args:
        logits: [batch, vocab] raw.
        samplings: list of one Sampling a row.
        noise: a noise.DraftNoise.
        index: position in the block.
        workspaces: see verify.
    Returns: ids [batch] int64, log-sum-exp after temperature and filters [batch] float32.
    """
    none = Draft(noise.seeds.new_empty(len(logits), 0))
    purpose = DRAFT if noise.positions is None else COUPLED
    positions = torch.full_like(noise.seeds, index) if noise.positions is None else noise.positions + index
    ws = _launch(logits[:, None], none, samplings, None, noise.seeds, positions, "coupled", purpose, workspaces)
    return ws.result.next_token_ids.clone(), ws.logs[:, 2, 0].clone()


def _launch(
    target_logits, draft, samplings, log_uniforms, seeds, positions, method, purpose, workspaces, phases=None
):  # fmt: skip
    """Everything behind the doors; `phases` are asked for one by one where they are timed apart."""
    batch, rows, vocab = target_logits.shape
    gamma, logits, vocab_ids = rows - 1, draft.logits, draft.vocab_ids
    if method == "coupled" or not gamma:
        logits = vocab_ids = None
    kind = 0 if logits is None else 1 if draft.logsumexp is None else 2
    target = target_logits.contiguous()
    logits = target if logits is None else logits.contiguous()
    shape, workspaces = (batch, gamma, vocab, target.device), {} if workspaces is None else workspaces
    if shape not in workspaces:
        with torch.inference_mode(False):  # buffers outlive the caller's mode
            workspaces[shape] = Workspace(*shape)
    ws, draft_vocab = workspaces[shape], logits.shape[-1]
    ws.prepare(samplings)
    ids, log_u = draft.token_ids.contiguous(), ws.floors if log_uniforms is None else log_uniforms.contiguous()
    kept = draft.logsumexp.contiguous() if kind == 2 else log_u
    if ws.filtered:
        _floors_kernel[2 * gamma + 1 if kind else gamma + 1, batch](
            target, logits, ids, ws.laws, ws.floors, gamma, vocab, draft_vocab,
            SKIP=min(_SKIP[target.dtype], _SKIP[logits.dtype]), GAMMA=ws.width,
            BLOCK=min(4096, triton.next_power_of_2(vocab)), num_warps=8,
        )  # fmt: skip
    inverse = ws.inverse(vocab_ids)
    seeds = seeds.contiguous()
    positions = seeds if positions is None else positions.contiguous()
    varying = target, logits, ids, kept, log_u, seeds, positions, inverse
    places = [t.data_ptr() % 16 for t in varying]
    key = (target.dtype, logits.dtype, method, purpose, ws.filtered, kind, vocab_ids is None, draft_vocab, *places)
    for phase in phases or (((1, 2, 3) if method == "block" else (1, 3)) if INTERPRETED else (0,)):
        if (phase, key) in ws.compiled:  # past Triton's own look-up, which takes longer than the launch
            launch, others = ws.compiled[phase, key]
            launch(*varying, *others)
            continue
        aligned = vocab % 8 == 0 and draft_vocab % 8 == 0 and not any(places[:2])
        own = ws.laws, ws.floors, ws.parts, ws.winners, ws.bounds, ws.state, ws.out, ws.logs
        numbers = gamma, vocab, draft_vocab, ws.part
        constants = dict(
            PHASE=phase, METHOD=METHODS.index(method), PURPOSE=purpose, FILTERED=ws.filtered, BLOCK=TILE,
            LANES=LANES, TILES=ws.run, BOUNDS=ws.bounded, FEW=FEW, ROWS=rows, GAMMA=ws.width,
            SPLITS=triton.next_power_of_2(ws.splits), KIND=kind, DENSE=vocab_ids is None,
            ALIGNED=aligned,
        )  # fmt: skip
        fits = aligned and rows * max(target.element_size(), logits.element_size()) <= HELD
        options = dict(num_warps=LANES // 32, maxnreg=REGISTERS if fits else None)
        compiled = _verify_kernel[ws.splits, batch](*varying, *own, *numbers, **constants, **options)
        if not INTERPRETED:  # addresses of buffers that stay: Triton asks the driver about each tensor
            others = *(t.data_ptr() for t in own), *numbers, *constants.values()
            ws.compiled[phase, key] = compiled[ws.splits, batch, 1], others
    return ws
