"""Who runs next, and how does every turn come to its one end?

One thread owns the engine, the sessions and the store. `submit`, `order` and a `CancelToken` are
the ways in; frozen events through a sink, and futures, are the ways out. The thread works unit by
unit (a plan, a chunk, a step); between two units it looks at all else: orders, upkeep, turns that
were cancelled while parked, and whether the running turn makes way (`serving/schedule/policy.py`).

  W1  A submitted turn gets exactly one terminal event: whatever raises, and whoever gives up.
      A submit that raises delivers nothing; the exception is the answer.
  W2  A cancelled turn that waits leaves the queue in the cancelling thread, at once; one that is
      parked ends within one unit of work.
  W3  A client's fault fails that turn. Any other fault turns health red, fails the parked and the
      waiting turns at once, and is over when the engine could be reset.
  W4  Only a clean DONE leaves a session hot.
  W5  `submit`, `order`, `depth` and `health` never wait for the engine.
  W6  Turns that name the same session run in the order of their arrival, never one inside another.
  W7  A worker that drains takes nothing new and ends what it has; `cancel_all` cuts that short.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from capserve.engine.seam import Engine
from capserve.errors import CapserveError, EngineError, QueueFullError, UnavailableError
from capserve.serving.admission import admit
from capserve.serving.capsules.keeper import Keeper
from capserve.serving.capsules.store import CapsuleStore
from capserve.serving.lifecycle import Lifecycle, TurnState
from capserve.serving.limits import Limits
from capserve.serving.metrics import MetricsLog, TurnMetrics
from capserve.serving.prefix import AutoPrefixPolicy
from capserve.serving.rates import RateMeter
from capserve.serving.running.bench import (
    Bench,
    Cancelled,
    Done,
    MakeOutput,
    Records,
    SinkError,
    Turn,
)
from capserve.serving.running.endings import (
    SHUTDOWN,
    AnyEnding,
    last_event,
    last_state,
    shutting_down,
)
from capserve.serving.schedule.forecast import Clocked
from capserve.serving.schedule.order_queue import Desk, OrderQueue
from capserve.serving.schedule.stage import Stage
from capserve.serving.sessions.archive import Archive
from capserve.serving.sessions.orders import SessionOrder
from capserve.serving.sessions.registry import SessionRegistry
from capserve.serving.sessions.transcripts import Transcripts
from capserve.serving.snapshot import Snapshot, Standing
from capserve.serving.tally import Tally
from capserve.serving.turn import WorkItem
from capserve.serving.watch import Watch, phase_of

log = logging.getLogger("capserve.worker")

IDLE_CHECK_S = 5.0
"""From one upkeep to the next: old things expire, accounts are checked, a fault is healed."""

WATCHDOG_S = 60.0
"""Longest that a unit of work may take before `/health` turns red (`serving/watch.py`)."""


class EngineWorker:
    """`archive`: without one, nothing outlives the process. `desk`: without one, no orders are
    taken."""

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        policy: AutoPrefixPolicy,
        store: CapsuleStore,
        sessions: SessionRegistry,
        transcripts: Transcripts,
        metrics: MetricsLog,
        make_output: MakeOutput,
        records: Records,
        *,
        archive: Archive | None = None,
        desk: Desk | None = None,
        meter: RateMeter | None = None,
        watch: Watch | None = None,
        idle_check_s: float = IDLE_CHECK_S,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        """prepare: what the engine's thread does before anything else."""
        self._prepare = prepare
        self._engine = engine
        self._engine_limits = engine.limits
        self._limits = limits
        self._store = store
        self._sessions = sessions
        self._metrics = metrics
        self._desk = desk
        self._keeper = Keeper(engine, store, sessions)
        archive = archive or Archive(transcripts)
        sessions.watch_ends(archive.session_gone)
        bench = Bench(
            engine=engine,
            limits=limits,
            policy=policy,
            index=store,
            sessions=sessions,
            keeper=self._keeper,
            archive=archive,
            meter=meter or RateMeter(),
            make_output=make_output,
            records=records,
        )
        self._watch = watch or Watch(WATCHDOG_S)
        self._idle_check_s = idle_check_s
        self._upkeep_at = time.monotonic() + idle_check_s
        self._changed = threading.Condition()
        # Guarded by `_changed`:
        self._stage = Stage(self._changed, bench)
        self._orders = OrderQueue()
        self._started = False
        self._draining = False
        self._stopping = False
        self._fault: str | None = None
        self._faults = 0
        self._turn_s = 1.0  # moving average, for Retry-After
        self._snapshot = Snapshot(0, None, store.footprint(), engine.graph_capture_count)
        self._thread = threading.Thread(target=self._loop, name="capserve-engine", daemon=True)
        metrics.watch_queue(self.depth)
        self._watch.expose(metrics.registry)

    # -- from any thread ---------------------------------------------------------------------

    def start(self) -> None:
        with self._changed:
            assert not self._started, "a worker starts once"
            self._started = True
            self._changed.notify_all()
        self._thread.start()

    def drain(self) -> None:
        """Refuse what is new; what was taken, waiting turns too, is served to its end."""
        with self._changed:
            self._draining = True

    @property
    def drained(self) -> bool:
        """No turn runs, is parked or waits, and no order either."""
        with self._changed:
            return not (self._stage.begun() or self._stage.queue or self._orders)

    def cancel_all(self) -> None:
        """Take nothing more, cancel the running and the parked turns, fail what waits with 503.

        Returns at once: a turn that has begun ends with its unit of work.
        """
        with self._changed:
            self._stopping = True
            waiting, orders = self._stage.drain(), self._orders.drain()
            begun = self._stage.begun()
            self._changed.notify_all()
        for turn in waiting:
            self._end(turn, shutting_down())
        for asked in orders:
            asked.fail(shutting_down())
        for clocked in begun:
            clocked.turn.item.cancel.cancel(SHUTDOWN)

    def stop(self, timeout: float | None = None) -> bool:
        """`cancel_all`, then wait for the thread; False when it is busy after `timeout` seconds."""
        self.cancel_all()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def ready(self) -> bool:
        """Turns are taken, and the engine gets on with them."""
        return self._standing().status == "ok"

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Wait until turns are taken; False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._standing().open, timeout)

    def _standing(self) -> Standing:
        with self._changed:
            running = self._stage.running
            return Standing(
                started=self._started,
                draining=self._draining,
                stopping=self._stopping,
                running=None if running is None else running.turn.item.request.request_id,
                parked=len(self._stage.parked),
                fault=self._fault,
                faults=self._faults,
                overdue=self._watch.overdue(),
            )

    def depth(self) -> int:
        """Turns that wait; the running one and the parked ones do not count."""
        return len(self._stage.queue)

    def submit(self, item: WorkItem) -> None:
        """Queue a turn, or raise at once. Never blocks on the engine.

        UnavailableError (503), QueueFullError (429), TooLargeError (413), ContextLengthError and
        InvalidRequestError (400).
        """
        turn = Turn(
            item,
            Lifecycle(enqueued_at=item.submitted_at),
            Tally(item.tokenize_ms, len(item.request.prompt.tokens), time.monotonic()),
        )
        try:
            admit(item.request, self._limits, self._engine_limits)
            with self._changed:
                self._refuse_unless_open()
                self._refuse_beyond_depth()
                turn.life.to(TurnState.QUEUED)
                self._stage.queue.append(turn)
                self._changed.notify()
        except CapserveError:
            turn.life.to(TurnState.REJECTED)
            self._count(turn)
            raise
        item.cancel.subscribe(lambda: self._withdraw(turn))

    def order(self, order: SessionOrder) -> Future[Any]:
        """Have `order` carried out by the desk, in the worker's thread, between two units of work.

        The future gets the desk's result, or a CapserveError; UnavailableError when the worker
        stops or the engine fails before. Raises QueueFullError (429), UnavailableError (503).
        """
        assert self._desk is not None, "a worker without a desk takes no orders"
        with self._changed:
            self._refuse_unless_open()
            future = self._orders.add(order)
            self._changed.notify()
        return future

    def health(self) -> dict[str, Any]:
        """Everything that `/health` shows, as plain values."""
        return {
            **self._standing().health(),
            "model": self._engine_limits.model_name,
            "schedule": self._limits.schedule,
            **self._snapshot.health(),
            "turns": self._metrics.health(),
        }

    def _refuse_unless_open(self) -> None:
        standing = self._standing()
        if standing.open:
            return
        if standing.fault is None:
            what = "shutting down" if standing.leaving else "not ready yet"
            raise UnavailableError(f"The server is {what}.", retry_after_s=5.0)
        raise UnavailableError("The engine failed and is being reset.", retry_after_s=5.0)

    def _refuse_beyond_depth(self) -> None:
        # An idle worker takes one turn that never counts as waiting.
        waiting = self.depth()
        if waiting >= self._limits.max_queue_depth + (not self._stage.begun()):
            raise QueueFullError(
                f"{waiting} turns wait, max_queue_depth is {self._limits.max_queue_depth}.",
                retry_after_s=min(60.0, max(1.0, self._turn_s * (waiting + 1))),
            )

    def _withdraw(self, turn: Turn) -> None:
        with self._changed:
            if not self._stage.withdraw(turn):
                return  # it has begun, and its token is looked at; or it has ended
        self._end(turn, Cancelled())

    # -- the worker's thread -----------------------------------------------------------------

    def _loop(self) -> None:
        self._publish()  # what came back from disk
        try:
            self._prepare()
        except Exception as error:
            log.exception("the engine's thread could not be prepared")
            self._break_down(error)
        while self._wait():
            try:
                self._look_around()
                with self._watch.unit("schedule"):
                    clocked = self._stage.choose()
                if clocked is not None:
                    self._advance(clocked)
            except Exception as error:
                log.exception("%s: the engine failed", self._at_work())
                self._break_down(error)

    def _at_work(self) -> str:
        running = self._stage.running
        return "between turns" if running is None else running.turn.item.request.request_id

    def _wait(self) -> bool:
        """Until there is something to do. False: it is to stop, and every turn has ended."""
        with self._changed:
            while not (self._stage.begun() or self._stage.queue or self._orders):
                if self._stopping:
                    return False
                left_s = self._upkeep_at - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            return True

    def _look_around(self) -> None:
        """What is due between two units of work, besides turns."""
        if time.monotonic() >= self._upkeep_at:
            self._upkeep_at = time.monotonic() + self._idle_check_s
            with self._watch.unit("upkeep"):
                self._upkeep()
        with self._changed:
            asked = self._orders.take()
        if asked is not None and self._desk is not None:
            position = self._engine.position
            with self._watch.unit("order"):
                asked.run(self._desk)
            idle = self._stage.running is None
            assert idle or self._engine.position == position, "an order moved a turn's state"
            self._publish()
        for clocked in [parked for parked in self._stage.parked if parked.run.cancelled]:
            self._conclude(clocked, Cancelled())

    def _advance(self, clocked: Clocked) -> None:
        began = time.monotonic()
        ending: AnyEnding | None
        try:
            with self._watch.unit(phase_of(clocked.run.prefill_left_tokens)):
                ending = clocked.run.advance()
        except SinkError as error:
            log.warning("%s: the sink failed: %s", self._at_work(), error)
            ending = CapserveError("The reply could not be delivered.")
        except CapserveError as error:
            if error.status >= 500:
                raise
            ending = error
        self._stage.worked(clocked, (time.monotonic() - began) * 1e3)
        if ending is not None:
            self._conclude(clocked, ending)

    def _conclude(self, clocked: Clocked, ending: AnyEnding) -> None:
        """A turn that has begun, running or parked, is over."""
        self._stage.over(clocked, finished=isinstance(ending, Done))
        with self._changed:
            self._turn_s += 0.2 * (clocked.own_ms / 1e3 - self._turn_s)
        self._publish()
        self._end(clocked.turn, ending)

    def _upkeep(self) -> None:
        if self._fault is not None:
            self._heal()
        try:
            self._keeper.expire(time.monotonic())
        except Exception as error:
            # A broken account must be seen, but must not end the thread that everybody waits for.
            log.exception("upkeep failed; the store is emptied")
            self._break_down(error, empty_store=True)
        self._publish()

    def _break_down(self, error: Exception, *, empty_store: bool = False) -> None:
        """Red first, so that nothing new enters; then everybody hears; then try to heal."""
        fault = f"{type(error).__name__}: {error}"
        with self._changed:
            self._fault = fault
            self._faults += 1
            begun = self._stage.begun()
            waiting, orders = self._stage.drain(), self._orders.drain()
            self._stage.parked.clear()
        for clocked in begun:
            try:
                clocked.run.close()
            except Exception:
                # Its hold may be lost in a broken store; its client must hear of the end anyway.
                log.exception("%s: not closed", clocked.turn.item.request.request_id)
        if empty_store:
            self._store.clear()  # an empty one is right again, and is not found broken forever
        for turn in [*(clocked.turn for clocked in begun), *waiting]:
            self._end(
                turn,
                EngineError("The engine failed; its log says why. The turn may be sent again."),
            )
        for asked in orders:
            asked.fail(UnavailableError("The engine failed and is being reset.", retry_after_s=5.0))
        self._heal()
        self._publish()

    def _heal(self) -> None:
        try:
            self._sessions.clear_hot()
            self._engine.reset()
        except Exception:
            log.exception("the engine could not be reset; trying again when idle")
            return
        with self._changed:
            self._fault = None
            self._changed.notify_all()

    def _publish(self) -> None:
        hot = self._sessions.hot
        self._snapshot = Snapshot(
            len(self._sessions),
            None if hot is None else self._engine.position,
            self._store.footprint(),
            self._engine.graph_capture_count,
        )

    # -- the one end -------------------------------------------------------------------------

    def _end(self, turn: Turn, ending: AnyEnding) -> None:
        """Every submitted turn ends here, once: its state, its record, its terminal event."""
        turn.life.to(last_state(turn, ending))
        event = last_event(turn, ending, self._count(turn))
        with self._changed:
            # Before the news: who sends the next turn at once must not find this one in the way.
            running = self._stage.running
            if running is not None and running.turn is turn:
                self._stage.running = None
        try:
            turn.item.sink.deliver(event)
        except Exception:
            log.exception("%s: the terminal event was not taken", turn.item.request.request_id)

    def _count(self, turn: Turn) -> TurnMetrics:
        # Not from the engine: a waiting turn may end in any thread.
        captures = self._snapshot.graph_capture_count
        metrics = turn.tally.freeze(turn.item.request.request_id, turn.life, captures)
        try:
            self._metrics.record(metrics)
        except Exception:
            # A view that can't be updated must not cost a turn its terminal event.
            log.exception("%s: the record was not taken", metrics.request_id)
        return metrics
