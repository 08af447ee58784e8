"""Who runs next, and how does every turn come to its one end?

One thread owns the engine, the sessions and the store. `submit` and a `CancelToken` are the two
ways in; frozen events through a sink are the way out. Turns run one after the other, first come
first served.

  W1  A submitted turn gets exactly one terminal event: whatever raises, and whoever gives up.
      A submit that raises delivers nothing; the exception is the answer.
  W2  A cancelled turn that waits leaves the queue in the cancelling thread, at once.
  W3  A client's fault fails that turn. Any other fault turns health red, fails the waiting turns
      at once, and is over when the engine could be reset.
  W4  Only a clean DONE leaves a session hot.
  W5  `submit`, `depth` and `health` never wait for the engine.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any, assert_never

from capserve.engine.seam import Engine
from capserve.errors import CapserveError, EngineError, QueueFullError, UnavailableError
from capserve.serving.admission import admit
from capserve.serving.capsules import CapsuleStore, Footprint
from capserve.serving.keeper import Keeper
from capserve.serving.lifecycle import Lifecycle, TurnState
from capserve.serving.limits import Limits
from capserve.serving.metrics import MetricsLog, TurnMetrics
from capserve.serving.prefix import AutoPrefixPolicy
from capserve.serving.rates import RateMeter
from capserve.serving.sessions import SessionRegistry
from capserve.serving.tally import Tally
from capserve.serving.transcripts import Transcripts
from capserve.serving.turn import Failed, Finished, TurnCancelledError, WorkItem
from capserve.serving.turn_run import (
    Bench,
    Cancelled,
    Done,
    MakeOutput,
    Records,
    SinkError,
    Turn,
    TurnRun,
)

log = logging.getLogger("capserve.worker")

SHUTDOWN = "shutdown"
"""The cancel reason that is the server's own doing: its client sees 503, not 499."""

IDLE_CHECK_S = 5.0
"""From one upkeep to the next: old things expire, accounts are checked, a fault is healed."""


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """What `health` may know of the worker thread's things; replaced whole after each turn."""

    sessions: int
    hot_position: int | None
    capsules: Footprint
    graph_capture_count: int


class EngineWorker:
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
        meter: RateMeter | None = None,
        idle_check_s: float = IDLE_CHECK_S,
    ) -> None:
        self._engine = engine
        self._engine_limits = engine.limits
        self._limits = limits
        self._store = store
        self._sessions = sessions
        self._metrics = metrics
        self._keeper = Keeper(engine, store, sessions)
        self._bench = Bench(
            engine=engine,
            limits=limits,
            policy=policy,
            index=store,
            sessions=sessions,
            keeper=self._keeper,
            transcripts=transcripts,
            meter=meter or RateMeter(),
            make_output=make_output,
            records=records,
        )
        self._idle_check_s = idle_check_s
        self._upkeep_at = time.monotonic() + idle_check_s
        self._changed = threading.Condition()
        # Guarded by `_changed`:
        self._queue: deque[Turn] = deque()
        self._running: Turn | None = None
        self._started = False
        self._stopping = False
        self._fault: str | None = None
        self._faults = 0
        self._turn_s = 1.0  # moving average, for Retry-After
        self._snapshot = _Snapshot(0, None, store.footprint(), engine.graph_capture_count)
        self._thread = threading.Thread(target=self._loop, name="capserve-engine", daemon=True)
        metrics.watch_queue(self.depth)

    # -- from any thread ---------------------------------------------------------------------

    def start(self) -> None:
        with self._changed:
            assert not self._started, "a worker starts once"
            self._started = True
            self._changed.notify_all()
        self._thread.start()

    def stop(self, timeout: float | None = None) -> bool:
        """Take no more turns, cancel the running one, fail the waiting ones with 503.

        Waits for the thread; False when it is still busy after `timeout` seconds.
        """
        with self._changed:
            self._stopping = True
            waiting = self._drain()
            running = self._running
            self._changed.notify_all()
        for turn in waiting:
            self._end(turn, UnavailableError("The server is shutting down.", retry_after_s=5.0))
        if running is not None:
            running.item.cancel.cancel(SHUTDOWN)
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def ready(self) -> bool:
        with self._changed:
            return self._is_ready()

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Wait until turns are taken; False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(self._is_ready, timeout)

    def _is_ready(self) -> bool:
        return self._started and not self._stopping and self._fault is None

    def depth(self) -> int:
        """Turns that wait; the running one does not count."""
        return len(self._queue)

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
                turn.life.to(TurnState.QUEUED)
                self._queue.append(turn)
                self._changed.notify()
        except CapserveError:
            turn.life.to(TurnState.REJECTED)
            self._count(turn)
            raise
        item.cancel.subscribe(lambda: self._withdraw(turn))

    def health(self) -> dict[str, Any]:
        """Everything that `/health` shows, as plain values."""
        with self._changed:
            running, stopping, started = self._running, self._stopping, self._started
            fault, faults = self._fault, self._faults
        seen = self._snapshot
        if fault is not None:
            status = "error"
        elif stopping:
            status = "stopping"
        else:
            status = "ok" if started else "starting"
        return {
            "status": status,
            "ready": status == "ok",
            "model": self._engine_limits.model_name,
            "running": None if running is None else running.item.request.request_id,
            "faults": faults,
            "fault": fault,
            "sessions": seen.sessions,
            "hot_position": seen.hot_position,
            "capsules": asdict(seen.capsules),
            "turns": self._metrics.health(),
        }

    def _refuse_unless_open(self) -> None:
        if not self._started or self._stopping:
            what = "shutting down" if self._stopping else "not ready yet"
            raise UnavailableError(f"The server is {what}.", retry_after_s=5.0)
        if self._fault is not None:
            raise UnavailableError("The engine failed and is being reset.", retry_after_s=5.0)
        # An idle worker takes one turn that never counts as waiting.
        room = self._limits.max_queue_depth + (self._running is None)
        if len(self._queue) >= room:
            raise QueueFullError(
                f"{len(self._queue)} turns wait, max_queue_depth is "
                f"{self._limits.max_queue_depth}.",
                retry_after_s=min(60.0, max(1.0, self._turn_s * (len(self._queue) + 1))),
            )

    def _withdraw(self, turn: Turn) -> None:
        with self._changed:
            if turn not in self._queue:
                return  # it runs, and looks at its token itself; or it has ended
            self._queue.remove(turn)
        self._end(turn, Cancelled())

    def _drain(self) -> list[Turn]:
        waiting = list(self._queue)
        self._queue.clear()
        return waiting

    # -- the worker's thread -----------------------------------------------------------------

    def _loop(self) -> None:
        while (turn := self._next()) is not None:
            began = time.monotonic()
            self._serve(turn)
            with self._changed:
                self._turn_s += 0.2 * (time.monotonic() - began - self._turn_s)

    def _next(self) -> Turn | None:
        """The next turn, or None when the worker is to stop. Upkeep is due on a busy one too."""
        while True:
            if time.monotonic() >= self._upkeep_at:
                self._upkeep()
                self._upkeep_at = time.monotonic() + self._idle_check_s
            with self._changed:
                if not self._queue and not self._stopping:
                    self._changed.wait(max(0.0, self._upkeep_at - time.monotonic()))
                if self._stopping:
                    return None
                if self._queue:
                    self._running = self._queue.popleft()
                    return self._running

    def _upkeep(self) -> None:
        if self._fault is not None:
            self._heal()
        try:
            self._keeper.expire(time.monotonic())
        except Exception as error:
            # A broken account must be seen, but must not end the thread that everybody waits for.
            log.exception("upkeep failed; the store is emptied")
            self._store.clear()  # an empty one is right again, and is not found broken forever
            self._break_down(None, error)
        self._publish()

    def _serve(self, turn: Turn) -> None:
        ending: Done | Cancelled | CapserveError
        try:
            ending = TurnRun(turn, self._bench).run()
            self._publish()
        except SinkError as error:
            log.warning("%s: the sink failed: %s", turn.item.request.request_id, error)
            ending = CapserveError("The reply could not be delivered.")
        except CapserveError as error:
            ending = error
            if error.status >= 500:
                self._break_down(turn, error)
                return
        except Exception as error:
            log.exception("%s: the engine failed", turn.item.request.request_id)
            self._break_down(turn, error)
            return
        self._end(turn, ending)

    def _break_down(self, turn: Turn | None, error: Exception) -> None:
        """Red first, so that nothing new enters; then everybody hears; then try to heal."""
        fault = f"{type(error).__name__}: {error}"
        with self._changed:
            self._fault = fault
            self._faults += 1
            waiting = self._drain()
        for failed in waiting if turn is None else [turn, *waiting]:
            self._end(
                failed,
                EngineError("The engine failed; its log says why. The turn may be sent again."),
            )
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
        self._snapshot = _Snapshot(
            len(self._sessions),
            None if hot is None else self._engine.position,
            self._store.footprint(),
            self._engine.graph_capture_count,
        )

    # -- the one end -------------------------------------------------------------------------

    def _end(self, turn: Turn, ending: Done | Cancelled | CapserveError) -> None:
        """Every submitted turn ends here, once: its state, its record, its terminal event."""
        life = turn.life
        match ending:
            case Done():
                life.to(TurnState.DONE)
            case Cancelled():
                life.to(TurnState.CANCELLED)
            case CapserveError():
                refused = life.state is TurnState.QUEUED and ending.status == 503
                life.to(TurnState.REJECTED if refused else TurnState.ERROR)
            case _:
                assert_never(ending)
        event = _terminal_event(turn, ending, self._count(turn))
        with self._changed:
            # Before the news: who sends the next turn at once must not find this one in the way.
            if self._running is turn:
                self._running = None
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


def _terminal_event(
    turn: Turn, ending: Done | Cancelled | CapserveError, metrics: TurnMetrics
) -> Finished | Failed:
    match ending:
        case Done():
            return Finished(
                reason=ending.reason,
                message=ending.message,
                prompt_tokens=len(turn.item.request.prompt.tokens),
                output_tokens=len(ending.output),
                reasoning_tokens=ending.reasoning_tokens,
                metrics=metrics,
            )
        case Cancelled():
            reason = turn.item.cancel.reason
            error: CapserveError = TurnCancelledError(f"The turn was cancelled: {reason}.")
            if reason == SHUTDOWN:
                error = UnavailableError("The server is shutting down.", retry_after_s=5.0)
            return Failed(error, metrics)
        case CapserveError():
            return Failed(ending, metrics)
        case _:
            assert_never(ending)
