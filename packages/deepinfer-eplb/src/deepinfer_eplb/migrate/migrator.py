"""Brings a group of ranks from one map to another, layer by layer, while steps run.

Every rank of the group calls `advance` once between two steps, which
    1. starts the next round of transfers of the layer that is being staged,
    2. votes, and
    3. if all ranks have all of that layer, copies it into its slots and writes its map.
So a step sees a layer wholly old or wholly new, and all ranks change it before the same step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

import numpy as np
import torch.distributed as dist
from torch import Tensor

from deepinfer_eplb.errors import MigrationError, PlanInputError, SettingError
from deepinfer_eplb.maps import Ints, Layout, is_whole, num_replicas_of
from deepinfer_eplb.migrate.agreement import Agree, Members, Vote, check_timeout, vote_over
from deepinfer_eplb.migrate.expert_maps import ExpertMaps, HostMap, Source, host_map
from deepinfer_eplb.migrate.lane import Lane
from deepinfer_eplb.migrate.staging import LayerSlots, Load, Staging

__all__ = ["Migrator"]


class _State(Enum):
    IDLE = "no migration is under way"
    MOVING = "a migration is under way; advance until it is done, or abort it"
    BROKEN = "a migration failed; make a group of the ranks that are left and call `recover`"


_TRANSITIONS = {
    (_State.IDLE, "start"): _State.MOVING,
    (_State.MOVING, "finish"): _State.IDLE,
    (_State.IDLE, "fail"): _State.BROKEN,
    (_State.MOVING, "fail"): _State.BROKEN,
    (_State.BROKEN, "fail"): _State.BROKEN,
    (_State.BROKEN, "recover"): _State.IDLE,
}


class Migrator:
    """Brings one rank's experts from the live map to a plan's, together with the other ranks'.

    Attributes:
        stopped: why the last migration ended early by agreement; None if it did not.
        bytes_sent, bytes_received: of this rank, since it was made.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        weights: Sequence[Mapping[str, Tensor]],
        maps: ExpertMaps,
        layout: Layout,
        *,
        bytes_per_step: float,
        ranks: Sequence[int] | None = None,
        agree: Agree | None = None,
        load: Load | None = None,
        timeout_seconds: float = 60.0,
    ) -> None:
        """Check the tensors. Nothing is sent before `start`.

        Args:
            group: carries the experts: gloo for tensors on a CPU, NCCL on CUDA. While a migration
                runs, nothing else may send from rank to rank over it.
            weights: by layer, by name: [slots_per_rank, ...], contiguous, of any dtype: all that
                belongs to an expert, such as weights, scales of blocks and biases. Written in
                place. Names, shapes and dtypes are the same on all ranks.
            maps: what steps read: the live map on every rank, on the device of the weights.
                Written in place.
            layout: of the live map.
            bytes_per_step: most bytes that a rank sends, and most that it receives, for one
                `advance`; one expert at least. `math.inf`: a layer at once.
            ranks: the layout's rank of each member of the group; None: all, in order.
            agree: gives the least vote of all ranks, on every rank the same. It may go by `vote`
                as it was at an earlier moment, if nothing was installed since. None:
                `vote_over(group)`, on a CPU only.
            load: reads (layer, expert) from the checkpoint: by name, the content of a slot. Called
                in `advance`, for experts that no member of the group holds.
            timeout_seconds: for the transfers of a layer after the last of them was started, and
                for the default `agree`.
        Raises:
            PlanInputError: tensors, maps or ranks do not fit the layout.
            SettingError: `bytes_per_step` is not above 0, `timeout_seconds` is not, or is above
                10^6, or `agree` is missing on CUDA.
        """
        if not isinstance(bytes_per_step, int | float) or not bytes_per_step > 0:
            raise SettingError(f"`bytes_per_step` is {bytes_per_step!r}; allowed: numbers above 0.")
        check_timeout(timeout_seconds)
        self._slots = [LayerSlots.of(layer, each, layout) for layer, each in enumerate(weights)]
        self._maps, self._load = maps, load
        # An engine may give 64 on one rank and 64.0 on another.
        self._bytes_per_step, self._timeout = float(bytes_per_step), float(timeout_seconds)
        self._live = HostMap.of_steps(maps, layout, len(weights))
        self._target = self._live
        self._queue: list[int] = []  # layers to install, the first one being staged
        self._staging: Staging | None = None
        self._doubt: Staging | None = None
        self._fault: Exception | None = None
        self._stop: str | None = None
        self._step: int | None = None
        self._state = _State.IDLE
        self.stopped: str | None = None
        self.bytes_sent = 0
        self.bytes_received = 0
        self._join(group, range(layout.num_ranks) if ranks is None else ranks, agree)

    @property
    def busy(self) -> bool:
        """Whether a migration is under way, so that `advance` has something to do."""
        return self._state is _State.MOVING

    @property
    def installed_map(self) -> Ints:
        """The map of the layers as they are now: [L, P] int32, a copy."""
        return self._live.physical_to_logical.copy()

    @property
    def vote(self) -> Vote:
        """What this rank says now: for a ballot that an engine exchanges while a step runs."""
        if self._state is _State.BROKEN:
            return Vote.FAULT
        if self._fault is None and self._staging is not None:
            try:
                self._staging.check(self._timeout)
            except Exception as error:  # whatever it is, the other ranks must learn of it
                self._fault = error
        if self._fault is not None:
            return Vote.FAULT
        if self._stop is not None:
            return Vote.ABORT
        return Vote.READY if self._has_layer else Vote.WAIT

    @property
    def _has_layer(self) -> bool:
        return self._staging is not None and self._staging.complete

    def start(self, plan: Source, layout: Layout | None = None) -> None:
        """Begin a migration. Every rank of the group calls it before the same step.

        Args:
            plan: a plan, a map of a file, or a map [L, P] whose replicas share their tokens evenly.
            layout: of a map; None: as now. A plan or a file brings its own. Excluded ranks that are
                members of the group send what they hold; what is on others is out of reach.
        Raises:
            PlanInputError: the map is not whole, has other sizes, or uses a rank outside the group.
            MigrationError: one is under way or failed; ranks have different plans, or another one
                refuses its own; or an expert is out of reach and there is no `load`. Nothing has
                changed, on any rank.
        """
        if self._state is not _State.IDLE:
            raise MigrationError(f"Rank {self._members.rank} cannot start: {self._state.value}.")
        target, refusal = self._live, None
        try:
            live = self._live
            target = host_map(plan, layout or live.layout, live.num_experts, len(self._slots))
            self._check_layout(target.layout)
        except Exception as error:  # whatever it is, the other ranks must learn of it
            refusal = error
        self._check_same(target, refusal)
        self._check_reach()
        self._target = target
        self._queue = self._live.changed_layers(target)
        self.stopped = None
        if self._queue:
            self._go("start")

    def advance(self, step: int) -> tuple[int, ...]:
        """Go on between two steps, on every rank before the same one; return layers installed.

        Does nothing while not `busy`. Ends the migration with its last layer, or after `abort`. On
        CUDA the steps' stream must be the current one; the host waits for nothing but `agree` and
        `load`.

        Args:
            step: number of the step that follows, whole; larger each time.
        Raises:
            MigrationError: a rank failed, now or before, or was given a `step` that does not grow.
                Layers installed before stay, all others keep the old map, on all ranks. `recover`
                is the way on.
        """
        if self._state is _State.BROKEN:
            raise MigrationError(f"Rank {self._members.rank} cannot advance: {self._state.value}.")
        if self._state is _State.IDLE:
            return ()
        self._take_step(step)
        self._move()
        decision = self._decide()
        if decision is Vote.FAULT:
            raise self._failed("another rank reported a fault")
        if decision is Vote.ABORT:
            # Nothing waits for transfers under way. Each was started at both ends, so it will end,
            # and what is started later comes after it.
            self.stopped = self._stop or "asked for by another rank"
            self._clear()
            self._go("finish")
        return (self._install(),) if decision is Vote.READY else ()

    def _take_step(self, step: int) -> None:
        """Keep the number, or find the fault that ends the migration on all ranks alike."""
        if is_whole(step) and (self._step is None or step > self._step):
            self._step = int(step)
        elif self._fault is None:
            self._fault = PlanInputError(
                f"`step` is {step!r} after {self._step}; needed: whole numbers that grow, one for "
                "each step"
            )

    def _move(self) -> None:
        """Start the next transfers, of the next layer if none is being staged.

        Also where the end is asked for: other ranks start the other ends of the same ones.
        """
        if self._fault is not None:
            return
        try:
            if self._staging is None:
                self._staging = Staging(
                    self._slots[self._queue[0]],
                    self._live,
                    self._target,
                    self._members,
                    self._lane,
                    self._bytes_per_step,
                    self._load,
                )
            sent, received = self._staging.advance(self._timeout)
        except Exception as error:  # whatever it is, the other ranks must learn of it
            self._fault = error
        else:
            self.bytes_sent += sent
            self.bytes_received += received

    def _decide(self) -> Vote:
        vote = self.vote
        try:
            decision = Vote(self._agree(vote))
        except Exception as error:  # whatever it is, the decision is not known here
            raise self._failed(f"the vote failed: {error}") from error
        if self._fault is not None:
            raise self._failed(str(self._fault)) from self._fault
        if decision is Vote.READY and not self._has_layer:
            raise self._failed("the group installs the layer, and this rank has not said READY")
        return decision

    def _install(self) -> int:
        assert self._staging is not None, "what is installed was staged"
        staging, self._staging = self._staging, None
        self._take(staging)
        self._queue.pop(0)
        if not self._queue:
            self._clear()  # of an end that was asked for too late
            self._go("finish")
        return staging.layer

    def _take(self, staging: Staging) -> None:
        staging.install(self._maps)
        self._live = self._live.with_layer(staging.layer, self._target)

    def abort(self, reason: str = "asked for by this rank") -> None:
        """Ask for an end of the migration, on one rank or several.

        The next `advance` ends it on every rank: layers installed by then stay, all others keep
        the old map, and the group can be used again. Does nothing while not `busy`.
        """
        if self.busy:
            self._stop = reason

    def recover(
        self, group: dist.ProcessGroup, ranks: Sequence[int], agree: Agree | None = None
    ) -> None:
        """Go on with another group, after a failure or without one. All its members call it.

        A rank that said READY and then lost touch cannot know whether others installed the layer.
        It kept that layer, and installs it here if another member has. So all members come to the
        same map, and `start` works again.

        Args:
            group: of the ranks that are left; the old one is not used any more.
            ranks: the layout's rank of each member. Exclude the others in the next plan.
            agree: see the constructor.
        Raises:
            PlanInputError: `ranks` do not fit the group or the layout.
            MigrationError: a member failed, or has a map that the others cannot come to.
        """
        if self._state is not _State.BROKEN:
            self._fail()
        self._join(group, ranks, agree)
        now = then = self._live.digest()
        if self._doubt is not None:
            then = self._live.with_layer(self._doubt.layer, self._target).digest()
        said = self._gather((now, then))
        held = {each[0] for each in said}
        if len(held) > 1:
            ends = [each[1] if each[1] in held else each[0] for each in said]
            if len(set(ends)) > 1:
                raise MigrationError(
                    f"Rank {self._members.rank}: ranks {list(self._members.ranks)} hold different "
                    f"maps, digests {ends}. Load the weights anew and make new migrators."
                )
            if self._doubt is not None and then in held:
                self._take(self._doubt)
        self._doubt = None
        self._go("recover")

    def _go(self, event: str) -> None:
        self._state = _TRANSITIONS[self._state, event]

    def _clear(self) -> None:
        self._queue, self._staging, self._fault, self._stop = [], None, None, None

    def _fail(self) -> None:
        if self._has_layer:  # it may be installed elsewhere; `recover` finds out
            self._doubt = self._staging
        self._clear()
        self._go("fail")

    def _failed(self, what: str) -> MigrationError:
        layer = self._queue[0]
        self._fail()
        return MigrationError(
            f"Rank {self._members.rank}, step {self._step}, layer {layer}: {what}. This layer and "
            f"later ones keep the old map: {self._state.value}."
        )

    def _join(self, group: dist.ProcessGroup, ranks: Sequence[int], agree: Agree | None) -> None:
        device = self._maps.bounds.device
        if agree is None and device.type != "cpu":
            raise SettingError(
                f"`agree` is missing for tensors on {str(device)!r}: a vote over their group would "
                "wait for its transfers. Give `vote_over` of a gloo group, or the engine's own."
            )
        members = Members(group, tuple(ranks), device, self._timeout)
        members.check(self._live.layout.num_ranks)
        self._members = members
        self._agree = vote_over(group, self._timeout) if agree is None else agree
        # Another lane for another group: transfers of the old one may hang in it for ever.
        self._lane = Lane(device, self._timeout)

    def _gather(self, values: tuple[int, ...]) -> list[list[int]]:
        try:
            return self._members.gather(values)
        except RuntimeError as error:
            self._fail()
            raise MigrationError(
                f"Rank {self._members.rank}: ranks {list(self._members.ranks)} could not compare "
                f"their maps: {error}. Nothing was changed: {self._state.value}."
            ) from error

    def _check_layout(self, layout: Layout) -> None:
        live = self._live.layout
        sizes = (layout.num_ranks, layout.num_nodes, layout.slots_per_rank)
        if sizes != (live.num_ranks, live.num_nodes, live.slots_per_rank):
            raise PlanInputError(
                f"The plan is for {sizes[0]} ranks on {sizes[1]} nodes with {sizes[2]} slots; "
                f"there are {live.num_ranks} on {live.num_nodes} with {live.slots_per_rank}."
            )
        outside = np.intersect1d(layout.active, self._members.others(layout.num_ranks))
        if len(outside):
            raise PlanInputError(
                f"The plan uses ranks {outside.tolist()}, which are not in the group of ranks "
                f"{list(self._members.ranks)}. Exclude them."
            )

    def _check_reach(self) -> None:
        shape = (len(self._slots), self._live.layout.num_ranks, -1)
        held = self._live.physical_to_logical.reshape(shape)[:, sorted(self._members.ranks)]
        counts = num_replicas_of(held.reshape(len(held), -1), self._live.num_experts)
        lost = np.argwhere(counts == 0).tolist()
        if lost and self._load is None:
            raise MigrationError(
                f"No member of the group holds expert {lost[0][1]} of layer {lost[0][0]}, nor "
                f"{len(lost) - 1} more experts. Give `load`, which reads them from the checkpoint."
            )

    def _check_same(self, target: HostMap, refusal: Exception | None) -> None:
        """Refuse to start unless all ranks would do the same.

        A rank that refuses its plan takes part, or the others would wait for it in vain.
        """
        sizes = [sorted(each.sizes.items()) for each in self._slots]
        ranks = [int(rank) for rank in self._members.ranks]
        setting = repr((target.layout, ranks, self._bytes_per_step, self._load is None, sizes))
        mine = (self._live.digest(), target.digest(setting), int(refusal is not None))
        said = self._gather(mine)
        if refusal is not None:
            raise refusal
        refusing = [rank for rank, each in zip(ranks, said, strict=True) if each[2]]
        if refusing:
            raise MigrationError(
                f"Rank {self._members.rank} cannot start: ranks {refusing} refuse the plan that "
                "they were given, and say why. Nothing has changed; start again with one that fits."
            )
        for column, what in enumerate(("live maps", "plans, tensors or settings")):
            digests = dict(zip(self._members.ranks, (each[column] for each in said), strict=True))
            if len(set(digests.values())) > 1:
                raise MigrationError(
                    f"Rank {self._members.rank}: ranks have different {what}; digests by rank: "
                    f"{digests}. Plan on one rank and broadcast, or from the same loads on all."
                )
