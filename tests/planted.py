"""One violation of each invariant, planted on purpose, and the test that must then fail.

A table, not a test: `tests/test_planted_violations.py` applies each entry to a copy of the sources.
An entry whose text is no longer there fails too, so the table can't go stale unseen.
"""

from __future__ import annotations

from dataclasses import dataclass

IMPORT_CONTRACTS = "lint-imports"
"""In place of a test: the import contracts of pyproject.toml."""


@dataclass(frozen=True)
class Edit:
    file: str
    """Below src/capserve."""
    old: str
    """Stands in the file exactly once."""
    new: str


@dataclass(frozen=True)
class Planted:
    invariant: str
    """As ARCHITECTURE.md numbers it."""
    violation: str
    test: str
    """Its node id below tests/, or `IMPORT_CONTRACTS`."""
    edits: tuple[Edit, ...]


PLANTED = (
    Planted(
        "I1",
        "health asks the session registry itself, from the event loop",
        "invariants/test_owner_and_order.py"
        "::test_only_the_workers_thread_touches_engine_sessions_and_store",
        (
            Edit(
                "serving/worker.py",
                "            **self._snapshot.health(),\n",
                '            **self._snapshot.health(), "sessions": len(self._sessions),\n',
            ),
        ),
    ),
    Planted(
        "I1",
        "the watchdog asks the engine how it is, from whatever thread looks",
        "unit/serving/test_worker_drain.py"
        "::test_a_unit_that_does_not_end_turns_health_red_until_it_ends[step-decode]",
        (
            Edit(
                "serving/worker.py",
                "overdue=self._watch.overdue(),",
                "overdue=self._watch.overdue() if self._engine.position else None,",
            ),
        ),
    ),
    Planted(
        "I2",
        "the sink hears of a chunk before the journal has it",
        "invariants/test_owner_and_order.py"
        "::test_a_chunk_is_in_the_journal_before_its_sink_hears_of_it",
        (
            Edit(
                "serving/running/decode_run.py",
                "        self._session.journal.append(chunk.tokens, SpanKind.DECODE)\n",
                "",
            ),
            Edit(
                "serving/running/decode_run.py",
                "        self._deliver(delta)\n",
                "        self._deliver(delta)\n"
                "        self._session.journal.append(chunk.tokens, SpanKind.DECODE)\n",
            ),
        ),
    ),
    Planted(
        "I3",
        "a turn that is cancelled in the queue leaves it without a terminal event",
        "unit/serving/test_worker_faults.py::test_a_turn_cancelled_in_the_queue_leaves_it_at_once",
        (
            Edit(
                "serving/worker.py",
                "or it has ended\n        self._end(turn, Cancelled())\n",
                "or it has ended\n",
            ),
        ),
    ),
    Planted(
        "I3",
        "turns that wait when the drain timeout is over are dropped unheard",
        "unit/serving/test_worker_drain.py"
        "::test_at_the_deadline_what_runs_is_cancelled_and_what_waits_is_told_to_come_back",
        (
            Edit(
                "serving/worker.py",
                "            self._end(turn, shutting_down())\n",
                "            del turn\n",
            ),
        ),
    ),
    Planted(
        "I3",
        "a server that drains goes on taking turns, and never ends",
        "unit/serving/test_worker_drain.py"
        "::test_a_draining_worker_takes_nothing_new_and_ends_what_runs_and_waits",
        (
            Edit(
                "serving/snapshot.py",
                "return self.started and not self.leaving and",
                "return self.started and not self.stopping and",
            ),
        ),
    ),
    Planted(
        "I3",
        "an engine fault forgets the turns that are parked",
        "unit/serving/test_worker_schedule.py"
        "::test_a_fault_fails_the_parked_turn_too_and_heals[extend-1]",
        (
            Edit(
                "serving/worker.py",
                "for clocked in begun), *waiting]:",
                "for clocked in begun[:1]), *waiting]:",
            ),
        ),
    ),
    Planted(
        "I4",
        "a reply that a stop string cut leaves its state hot: the state leads the transcript",
        "unit/serving/test_worker_turns.py"
        "::test_a_stop_string_ends_the_turn_and_leaves_no_session_hot",
        (
            Edit(
                "serving/running/turn_run.py",
                "        if done.clean:\n",
                "        if done:\n",
            ),
        ),
    ),
    Planted(
        "I4",
        "a turn that is cancelled leaves the hot mark of the turn before",
        "reuse/test_reuse_paths.py"
        "::test_a_retry_after_a_cancelled_decode_says_what_the_first_would_have_said[greedy]",
        (
            Edit(
                "serving/capsules/keeper.py",
                "        self._sessions.clear_hot()\n        now = time.monotonic()\n",
                "        now = time.monotonic()\n",
            ),
        ),
    ),
    Planted(
        "I4",
        "the hot mark of a guest stays when the parked turn takes the engine again",
        "unit/serving/test_worker_schedule.py"
        "::test_the_end_of_a_guest_is_hot_only_until_the_parked_turn_goes_on",
        (
            Edit(
                "serving/capsules/keeper.py",
                "        self._sessions.clear_hot()\n"
                "        moved_bytes = self._engine.restore(self",
                "        moved_bytes = self._engine.restore(self",
            ),
        ),
    ),
    Planted(
        "I5",
        "the wrong capsule is restored: one of the same length, with other tokens",
        "reuse/test_reuse_paths.py"
        "::test_a_talk_of_the_same_length_never_gets_the_others_state[greedy]",
        (
            Edit(
                "serving/journal.py",
                "        digests.append(fold.copy().digest())\n",
                '        digests.append(b"%16d" % position)\n',
            ),
        ),
    ),
    Planted(
        "I5",
        "half of a capsule is restored: the KV, but not the recurrent state",
        "reuse/test_reuse_paths.py::test_going_back_to_another_talk_restores_its_tip[sampled]",
        (
            Edit(
                "engine/capsule.py",
                "        state.recurrent.copy_(small.recurrent, non_blocking=True)\n",
                "",
            ),
        ),
    ),
    Planted(
        "I5",
        "what a cancelled prefill has read is thrown away, so that a retry never comes further",
        "reuse/test_reuse_paths.py"
        "::test_ten_impatient_retries_of_a_long_prompt_each_come_further[False]",
        (
            Edit(
                "serving/running/turn_run.py",
                "            self._keep_what_was_done()\n            return Cancelled()\n",
                "            return Cancelled()\n",
            ),
        ),
    ),
    Planted(
        "I16",
        "a decode that was parked goes on as if it had said nothing yet",
        "unit/serving/test_worker_schedule.py"
        "::test_a_short_turn_runs_inside_a_long_one_and_both_say_what_they_would_have_said[step-9]",
        (
            Edit(
                "serving/running/decode_run.py",
                "engine.begin(request.sampling, prompt, output, ",
                "engine.begin(request.sampling, prompt, None, ",
            ),
        ),
    ),
    Planted(
        "I16",
        "a decode that was parked goes on without the grammar of its reply",
        "unit/serving/test_worker_grammar.py"
        "::test_a_turn_that_was_parked_goes_on_under_its_grammar",
        (
            Edit(
                "serving/running/decode_run.py",
                "output, self._constraint)",
                "output, self._constraint if output is None else None)",
            ),
        ),
    ),
    Planted(
        "I6",
        "a first draft is accepted unseen",
        "contract/test_engine_contract.py"
        "::test_e5_the_tokens_do_not_depend_on_the_number_of_drafts",
        (
            Edit(
                "engine/speculate.py",
                "if i < len(drafts) and token != drafts[i]:",
                "if 0 < i < len(drafts) and token != drafts[i]:",
            ),
        ),
    ),
    Planted(
        "I7",
        "one row is multiplied by another kernel than several",
        "engine/test_exactness.py::test_a_row_of_a_matmul_has_the_same_bits_in_any_company",
        (
            Edit(
                "engine/layers/linear.py",
                "else x.float()\n        if count > MAX_ROWS:\n",
                "else x.float()\n        if count > 1:\n",
            ),
        ),
    ),
    Planted(
        "I8",
        "the bytes of an evicted capsule stay on the account",
        "unit/serving/test_capsules.py"
        "::test_shared_parts_count_once_and_leave_with_their_last_capsule",
        (
            Edit(
                "serving/capsules/tiers.py",
                "                self.used_bytes -= shared.part.nbytes\n",
                "",
            ),
        ),
    ),
    Planted(
        "I8",
        "a pin is evicted like any other capsule",
        "unit/serving/test_worker_limits.py"
        "::test_a_pin_outlives_a_store_that_is_full_and_its_own_session",
        (
            Edit(
                "serving/capsules/store.py",
                "return entry.pinned or entry.holds > 0 or key == self._protected",
                "return entry.holds > 0 or key == self._protected",
            ),
        ),
    ),
    Planted(
        "I8",
        "the state of a parked turn is evicted like any other capsule",
        "unit/serving/test_capsules.py::test_a_held_capsule_stays_until_its_last_hold_ends",
        (
            Edit(
                "serving/capsules/store.py",
                "return entry.pinned or entry.holds > 0 or key == self._protected",
                "return entry.pinned or key == self._protected",
            ),
        ),
    ),
    Planted(
        "I8",
        "a capsule that was demoted is still counted where it was",
        "unit/serving/test_capsules.py"
        "::test_what_makes_way_in_the_nearest_tier_goes_to_the_next_and_is_lost_from_the_last",
        (
            Edit(
                "serving/capsules/memory.py",
                "                self.leave(entry, evicted=True)\n",
                "",
            ),
        ),
    ),
    Planted(
        "I5",
        "a plan goes on in a session that a parked turn works on",
        "unit/serving/test_prefix.py::test_a_busy_session_is_forked_from_and_never_continued",
        (
            Edit(
                "serving/prefix.py",
                "if len(journal.tokens) <= past and not journal.busy:",
                "if len(journal.tokens) <= past:",
            ),
        ),
    ),
    Planted(
        "I5",
        "a plan starts from the state of a parked turn",
        "unit/serving/test_capsules.py"
        "::test_a_parked_state_is_found_by_no_plan_and_goes_with_its_hold",
        (
            Edit(
                "serving/capsules/store.py",
                "            self._parked[parked] = entry\n",
                "            self._catalog.add(entry)\n",
            ),
        ),
    ),
    Planted(
        "I9",
        "two API keys share what they call by the same name",
        "http/test_http_auth.py::test_namespaces_never_cross_callers_fields_or_values",
        (
            Edit(
                "api/auth.py",
                'return f"{caller}{OWNER_SEPARATOR}{inside}"',
                'return f"{OWNER_SEPARATOR}{inside}"',
            ),
        ),
    ),
    Planted(
        "I9",
        "a hot state is taken up in another namespace",
        "unit/serving/test_worker_turns.py"
        "::test_namespaces_never_share_state_and_the_reason_says_so",
        (
            Edit(
                "serving/prefix.py",
                "own = [journal for journal in journals if journal.namespace == namespace]",
                "own = list(journals)",
            ),
            Edit(
                "serving/prefix.py",
                "if hot is None or hot.journal.namespace != namespace or hot.position == 0:",
                "if hot is None or hot.position == 0:",
            ),
        ),
    ),
    Planted(
        "I10",
        "torch is imported in serving",
        IMPORT_CONTRACTS,
        (
            Edit(
                "serving/rates.py",
                "from capserve.serving.prefix import Rates\n",
                "import torch\n\nfrom capserve.serving.prefix import Rates\n",
            ),
        ),
    ),
    Planted(
        "I10",
        "the api reaches behind the engine's seam",
        IMPORT_CONTRACTS,
        (
            Edit(
                "api/state.py",
                "from __future__ import annotations\n",
                "from __future__ import annotations\n\n"
                "from capserve.engine.runtime import TorchEngine  # noqa: F401\n",
            ),
        ),
    ),
    Planted(
        "I11",
        "requests are parsed, rendered and tokenized on the event loop",
        "http/test_http_parts.py"
        "::test_text_jobs_run_one_by_one_off_the_loop_and_a_full_line_refuses",
        (
            Edit(
                "api/text_thread.py",
                "        future = self._pool.submit(job)\n",
                "        from concurrent.futures import Future\n\n"
                "        future: Future[T] = Future()\n"
                "        future.set_result(job())\n",
            ),
        ),
    ),
    Planted(
        "I12",
        "the MTP layer's KV is left out of the byte formula",
        "engine/test_capsule.py::test_capsule_bytes_equal_the_formula",
        (
            Edit(
                "engine/state.py",
                "kv_layers = config.full_layers + config.mtp_layers",
                "kv_layers = config.full_layers",
            ),
        ),
    ),
    Planted(
        "I6",
        "a thinking budget counts drafts that were taken back",
        "engine/test_thinking_budget.py::test_under_a_budget_drafts_and_parks_change_no_token",
        (
            Edit(
                "text/thinking.py",
                "            del self._places[-back:]\n            return\n",
                "            return\n",
            ),
        ),
    ),
    Planted(
        "I13",
        "the plain reply loses all parts but those of the last delta",
        "unit/serving/test_sinks.py::test_deltas_merge_into_what_they_add_up_to",
        (
            Edit(
                "serving/turn.py",
                "tuple(_joined(part for delta in deltas for part in delta.parts))",
                "deltas[-1].parts",
            ),
        ),
    ),
    Planted(
        "I13",
        "the plain reply shows the text without its last piece",
        "http/test_http_fold.py"
        "::test_stream_and_plain_are_the_same_message_for_200_replies_cut_at_every_byte",
        (
            Edit(
                "api/sse.py",
                'content = "".join(self._texts["content"])',
                'content = "".join(self._texts["content"][:64])',
            ),
        ),
    ),
    Planted(
        "I14",
        "the parts of a foreign file are taken under the names that they claim",
        "contract/test_capsule_contract.py"
        "::test_foreign_bytes_never_share_a_name_with_what_was_computed_here[tiny-300]",
        (Edit("engine/shelf.py", "        if apart:\n", "        if False:\n"),),
    ),
    Planted(
        "I15",
        "a damaged file is believed",
        "unit/serving/test_disk.py"
        "::test_a_bad_file_is_never_loaded_and_takes_its_capsules_along[flipped]",
        (Edit("serving/disk/files.py", " or fold.digest() != known.checksum", ""),),
    ),
)
