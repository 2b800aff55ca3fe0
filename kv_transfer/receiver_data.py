"""The data side of the receiver: frames, until the KV of a grant is complete and owned.

Invariant: ownership passes once, after every cell (layer, block) of the manifest arrived intact.
Only this worker writes its blocks; a write lasts from :meth:`ReceiverData.locate` to
:meth:`ReceiverData.on_frame`. Payload bytes never pass through here.
"""

from __future__ import annotations

from typing import Generic

import numpy as np
import numpy.typing as npt

from baton.proto.errors import ProtocolError
from baton.proto.wire.messages import Commit, Committed, KVFrame, Refused

from .grants import GrantState, Slot
from .past_attempts import PastAttempts
from .receiver_grants import Handover, Output, ReceiverGrants, Reply
from .store import A


class ReceiverData(Generic[A]):
    """Frames and manifests of all grants. ``damaged``: number of frames with a wrong checksum."""

    def __init__(self, grants: ReceiverGrants[A], past: PastAttempts) -> None:
        self._grants = grants
        self._past = past
        self.damaged = 0

    def locate(self, frame: KVFrame) -> npt.NDArray[np.int32] | None:
        """Return the pool blocks (int32) of a frame, or None if the frame must be dropped.

        After a result other than None, the caller writes the blocks and calls :meth:`on_frame`
        exactly once. Raises ProtocolError if the frame does not fit its grant: wrong bounds or
        size, overlapping cells, or more bytes than its credit.
        """
        slot = self._grants.table.find(frame.grant)
        if slot is None or slot.state not in (GrantState.GRANTED, GrantState.FILLING):
            self._grants.stale += 1
            return None
        if frame.index in slot.frames or frame.index in slot.moving:
            return None  # a duplicate frame
        self._check_bounds(slot, frame)
        if slot.in_place and not frame.shared:
            raise ProtocolError(f"KV frame {frame.index} carries what is read in place")
        if slot.allocation is None:
            return None
        if not self._grants.credits.receive(slot.index, frame.nbytes):
            raise ProtocolError(f"KV frame {frame.index} exceeds the byte credit of its grant")
        slot.moving[frame.index] = frame
        slot.came += frame.nbytes
        first, last = frame.block_start, frame.block_start + frame.block_count
        return slot.allocation.block_table[first:last]

    def _check_bounds(self, slot: Slot[A], frame: KVFrame) -> None:
        cells = slot.arrived
        layers = range(frame.layer_start, frame.layer_start + frame.layer_count)
        blocks = range(frame.block_start, frame.block_start + frame.block_count)
        if cells is None or not len(layers) or not len(blocks):
            raise ProtocolError(f"KV frame {frame.index} is empty")
        if layers.start < 0 or layers.stop > cells.shape[0]:
            raise ProtocolError(f"KV frame {frame.index}: layers outside the model")
        if blocks.start < 0 or blocks.stop > cells.shape[1]:
            raise ProtocolError(f"KV frame {frame.index}: blocks outside the grant")
        if frame.nbytes != len(layers) * len(blocks) * self._grants.block_bytes(slot):
            raise ProtocolError(
                f"KV frame {frame.index}: {frame.nbytes} bytes do not fit its shape"
            )
        if cells[layers.start : layers.stop, blocks.start : blocks.stop].any():
            raise ProtocolError(f"KV frame {frame.index} covers blocks that are already filled")
        if any(_overlap(frame, other) for other in slot.moving.values()):
            raise ProtocolError(f"KV frame {frame.index} covers blocks that are being written")

    def on_frame(self, frame: KVFrame, *, intact: bool, now: float) -> list[Output[A]]:
        """Record a located frame; ``intact``: its checksum matched and it is in the pool."""
        slot = self._grants.table.find(frame.grant)
        if slot is None or slot.arrived is None:
            self._grants.stale += 1
            return []
        slot.moving.pop(frame.index, None)
        if slot.state is GrantState.REVOKING:
            return self._grants.drained(slot)
        slot.progress_at = now
        if intact:
            slot.step("frame")
            slot.frames[frame.index] = frame.checksum
            slot.sizes += frame.nbytes
            slot.damaged.pop(frame.index, None)
            slot.arrived[
                frame.layer_start : frame.layer_start + frame.layer_count,
                frame.block_start : frame.block_start + frame.block_count,
            ] = True
        else:
            self.damaged += 1
            slot.damaged[frame.index] = frame.nbytes
        outputs = self._grants.credit_outputs()
        return outputs + (self._try_own(slot, now) if slot.commit else [])

    def not_recorded(self, frame: KVFrame) -> None:
        """Note that a located frame could not be recorded: nothing writes to its blocks now."""
        slot = self._grants.table.find(frame.grant)
        if slot is not None:
            slot.moving.pop(frame.index, None)

    def on_manifest(self, slot: Slot[A], message: Commit, now: float) -> list[Output[A]]:
        """Take ownership if all cells arrived; an incomplete manifest is answered later."""
        if slot.commit is None:
            slot.progress_at = now
        slot.commit = message
        fault = self._fault(slot, message)
        if fault:
            return self._fail(slot, "handoff_failed", fault)
        return self._try_own(slot, now)

    @staticmethod
    def _fault(slot: Slot[A], commit: Commit) -> str:
        """Return why a manifest can never match its grant, or an empty string."""
        reserve, cells = slot.reserve, slot.arrived
        if slot.state not in (GrantState.GRANTED, GrantState.FILLING):
            return ""
        if reserve is None or cells is None:
            return ""
        if commit.frames > cells.size:
            return f"{commit.frames} frames, but the grant has only {cells.size} cells"
        computed = len(commit.context.tokens) - 1
        if commit.context.generated_length < 1 or computed != reserve.num_tokens:
            return f"context of {computed + 1} tokens for a grant of {reserve.num_tokens}"
        return ""

    def _try_own(self, slot: Slot[A], now: float) -> list[Output[A]]:
        commit, cells, reserve = slot.commit, slot.arrived, slot.reserve
        if commit is None or cells is None or reserve is None or slot.allocation is None:
            return []
        if slot.damaged and len(slot.frames) + len(slot.damaged) >= commit.frames:
            return self._refuse_frames(slot, sorted(slot.damaged))
        if slot.moving or len(slot.frames) < commit.frames:
            return []  # frames are in flight; tick() requests them again if they do not arrive
        if not self._manifest_agrees(slot, commit) or not cells.all():
            return self._fail(slot, "handoff_failed", "the manifest does not match the frames")
        slot.step("own")
        self._grants.credits.close(slot.index)
        answer = Committed(
            request=commit.request,
            attempt=commit.attempt,
            grant=commit.grant,
            bytes=slot.sizes,
            frames=len(slot.frames),
        )
        name = (commit.request, commit.attempt)
        self._past.committed.put(name, (answer, slot.key), slot.expires)
        allocation = slot.allocation
        slot.allocation = None
        handover = Handover(commit, allocation, slot.sizes, reserve, slot.expires)
        return [Reply(slot.peer, answer), handover, *self._grants.credit_outputs()]

    @staticmethod
    def _manifest_agrees(slot: Slot[A], commit: Commit) -> bool:
        digest = 0
        for checksum in slot.frames.values():
            digest ^= checksum
        return (len(slot.frames), slot.sizes, digest) == (
            commit.frames,
            commit.bytes,
            commit.digest,
        )

    def ask_missing(self, slot: Slot[A], commit: Commit) -> list[Output[A]]:
        """Request the frames of a manifest that have not arrived."""
        return self._refuse_frames(slot, [i for i in range(commit.frames) if i not in slot.frames])

    def _refuse_frames(self, slot: Slot[A], missing: list[int]) -> list[Output[A]]:
        """Request frames again, with fresh credit for their bytes."""
        commit = slot.commit
        if commit is None:
            return []
        slot.refusals += 1
        if slot.refusals > self._grants.config.max_refusals:
            return self._fail(slot, "handoff_failed", f"frames {missing[:8]} never arrived intact")
        slot.damaged.clear()
        slot.credit = self._grants.credits.expect_again(slot.index, self._grants.absent_bytes(slot))
        message = Refused(
            request=commit.request,
            attempt=commit.attempt,
            grant=commit.grant,
            code="frames_missing",
            frames=missing,
            credit=slot.credit,
            counted=self._grants.credits.counted(slot.index),
            arrived=slot.came,
            round=slot.refusals,
        )
        slot.commit = None
        return [Reply(slot.peer, message)]

    def _fail(self, slot: Slot[A], code: str, text: str) -> list[Output[A]]:
        commit = slot.commit
        if commit is None:
            return []
        message = Refused(
            request=commit.request,
            attempt=commit.attempt,
            grant=commit.grant,
            code=code,
            message=text,
        )
        return self._grants.part(slot, message)


def _overlap(one: KVFrame, other: KVFrame) -> bool:
    """Return True if two frames share a cell."""
    layers = min(one.layer_start + one.layer_count, other.layer_start + other.layer_count)
    blocks = min(one.block_start + one.block_count, other.block_start + other.block_count)
    apart = layers <= max(one.layer_start, other.layer_start) or blocks <= max(
        one.block_start, other.block_start
    )
    return not apart
