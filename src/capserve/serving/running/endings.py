"""How is the end of a turn told: as which state, and as which last event?"""

from __future__ import annotations

from typing import assert_never

from capserve.errors import CapserveError, UnavailableError
from capserve.serving.lifecycle import TurnState
from capserve.serving.metrics import TurnMetrics
from capserve.serving.running.bench import Cancelled, Done, Turn
from capserve.serving.turn import Failed, Finished, TurnCancelledError

SHUTDOWN = "shutdown"
"""The cancel reason that is the server's own doing: its client sees 503, not 499."""

AnyEnding = Done | Cancelled | CapserveError


def shutting_down() -> UnavailableError:
    return UnavailableError("The server is shutting down.", retry_after_s=5.0)


def last_state(turn: Turn, ending: AnyEnding) -> TurnState:
    match ending:
        case Done():
            return TurnState.DONE
        case Cancelled():
            return TurnState.CANCELLED
        case CapserveError():
            refused = turn.life.state is TurnState.QUEUED and ending.status == 503
            return TurnState.REJECTED if refused else TurnState.ERROR
        case _:
            assert_never(ending)


def last_event(turn: Turn, ending: AnyEnding, metrics: TurnMetrics) -> Finished | Failed:
    match ending:
        case Done():
            return Finished(
                reason=ending.reason,
                message=ending.message,
                prompt_tokens=len(turn.item.request.prompt.tokens),
                output_tokens=len(ending.output),
                reasoning_tokens=ending.reasoning_tokens,
                metrics=metrics,
                stop_string=ending.stop_string,
            )
        case Cancelled():
            reason = turn.item.cancel.reason
            if reason == SHUTDOWN:
                return Failed(shutting_down(), metrics)
            return Failed(TurnCancelledError(f"The turn was cancelled: {reason}."), metrics)
        case CapserveError():
            return Failed(ending, metrics)
        case _:
            assert_never(ending)
